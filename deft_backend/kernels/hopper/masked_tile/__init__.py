"""The masked tile on Hopper: KV ranges to which different queries of an item attend."""

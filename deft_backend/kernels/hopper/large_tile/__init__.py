"""The large tile on Hopper: many query vectors and one KV range."""

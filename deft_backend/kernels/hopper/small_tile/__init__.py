"""The small tile on Hopper: few query vectors and one KV range."""

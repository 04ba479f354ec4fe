"""A client of token ids, through the endpoint of either host."""

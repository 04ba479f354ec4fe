"""Recorded trees of thoughts and of tokens, as data and as prefix forests."""

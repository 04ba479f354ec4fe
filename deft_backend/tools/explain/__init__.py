"""Explain a plan: its groups, and the bytes that it moves."""

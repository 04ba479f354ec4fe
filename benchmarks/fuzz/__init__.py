"""Fuzz plans and attention for a given time; every failing seed becomes a test case."""

"""``python -m benchmarks e2e``: real servers, one after the other, with the same requests."""

"""What an operator runs: comparisons, servers, traces, tuning, and views of a running server."""

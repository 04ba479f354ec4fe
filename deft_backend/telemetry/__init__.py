"""A server's counters and their outputs: the state file, log lines and metrics."""

"""What a server counts and shows: its state file (written and read), log lines, and metrics."""

"""The `deft` command: serve, compare, diagnose and explain."""

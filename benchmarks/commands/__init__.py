"""The commands of ``python -m benchmarks``: options, tables in the terminal, exit codes."""

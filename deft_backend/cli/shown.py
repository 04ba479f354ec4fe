"""Lines for the terminal and for logs."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)

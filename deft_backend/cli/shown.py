"""Lines for the terminal and for logs."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from rich.console import Console


def say(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring with one line for each paragraph, so that the terminal wraps it."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

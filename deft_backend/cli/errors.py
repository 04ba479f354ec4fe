"""Errors that a user can mend are told in a line or a few, not as a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

BAD_INPUT = 2
"""Exit code when the command could not do what it was asked to."""

stderr = Console(stderr=True)


def fail(message: str) -> typer.Exit:
    """Print `message`; the result is to be raised."""
    stderr.print(Text("Error: ", style="bold red"), Text(message), sep="", soft_wrap=True)
    return typer.Exit(BAD_INPUT)


@contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds into a message and exit code 2."""
    try:
        yield
    except kinds as error:
        raise fail(str(error)) from None


def host_arguments(words: Sequence[str] | None) -> list[str]:
    """What follows ``--``, for the host server."""
    found = list(words or [])
    if found and not found[0].startswith("-"):
        raise fail(
            f"unexpected argument {found[0]!r}. Options of the host server go behind '--', for "
            "example: -- --mem-fraction-static 0.8"
        )
    return found

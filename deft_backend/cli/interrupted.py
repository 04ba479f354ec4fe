"""Ctrl-C and SIGTERM unwind a command, so that no server outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from deft_backend.cli.errors import say

_ENDING = b"\ninterrupted; ending what this command started\n"


@contextmanager
def unwound(console: Console, line: str) -> Iterator[FirstSignal]:
    """Unwind the block at the first Ctrl-C or SIGTERM, then print `line` and exit.

    The exit code is the shell's: 130 or 143. Later signals have no effect, so that none interrupts
    the shutdown of a server: ``timeout`` sends two, and people press Ctrl-C twice. A block that
    ends in spite of a signal, to report something, finds its number in what this yields.
    """
    first = FirstSignal()
    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield first
    except (KeyboardInterrupt, asyncio.CancelledError):
        if first.number is None:  # the error did not come from a signal
            raise
        say(console, line)
        raise typer.Exit(128 + first.number) from None
    finally:
        # Python restores its own handlers before the process ends.
        for number, handler in before.items():
            signal.signal(number, handler if first.number is None else signal.SIG_IGN)


class FirstSignal:
    """Acts on the first signal only: cancels the loop's tasks, or raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: Any) -> None:
        if self.number is not None:
            return
        self.number = number
        os.write(2, _ENDING)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise KeyboardInterrupt from None
        # An exception could leave the loop's work half done. This call also wakes the loop.
        loop.call_soon_threadsafe(_cancel_all)


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()

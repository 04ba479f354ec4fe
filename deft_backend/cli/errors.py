"""Lines for the terminal, errors that a user can repair, and signals that end a command."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from deft_backend.files.folders import state_directory
from deft_backend.settings.config import Settings, SettingsError
from deft_backend.tools.servers.command import value_of

BAD_INPUT = 2  # exit code of a command that could not start its work

stderr = Console(stderr=True)


def fail(message: str) -> typer.Exit:
    stderr.print(Text("Error: ", style="bold red"), Text(message), sep="", soft_wrap=True)
    return typer.Exit(BAD_INPUT)


@contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise fail(str(error)) from None


def checked_settings() -> Settings:
    with reported(SettingsError):
        return Settings.from_env()


def state_folder() -> Path:
    with reported(SettingsError):
        return state_directory(Settings.from_env())


def host_arguments(words: Sequence[str] | None) -> list[str]:
    arguments = list(words or [])
    if arguments and not arguments[0].startswith("-"):
        raise fail(
            f"unexpected argument {arguments[0]!r}. Put options of the host server behind '--', "
            "for example: -- --mem-fraction-static 0.8"
        )
    for option in ("--attention-backend", "--decode-attention-backend"):
        if value_of(option, arguments) is not None:
            raise fail(
                f"{option} is given behind '--', where it would replace the plugin. Omit it; "
                "'deft ab --baseline' names the backend to compare with"
            )
    for option in ("--model-path", "--model"):
        if value_of(option, arguments) is not None:
            raise fail(f"{option} is given behind '--'; name the model with --model before it")
    return arguments


def say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring with one line for each paragraph, so that the terminal wraps it."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


_ENDING = b"\ninterrupted; ending what this command started\n"


@contextmanager
def unwound(console: Console, line: str) -> Iterator[FirstSignal]:
    """Unwind the block at the first Ctrl-C, SIGTERM or SIGHUP, then print `line` and exit.

    Later signals have no effect, so that none interrupts a server's shutdown: ``timeout`` sends
    two, and people press Ctrl-C twice. What this yields gets the signal's number.
    """
    first = FirstSignal()
    before = _handled((signal.SIGINT, *_endings()), first)
    try:
        yield first
    except (KeyboardInterrupt, asyncio.CancelledError):
        if first.number is None:  # the error did not come from a signal
            raise
        with suppress(OSError):  # the terminal may be gone
            say(console, line)
        raise typer.Exit(128 + first.number) from None
    finally:
        # Python restores its own handlers before the process ends.
        for number, handler in before.items():
            signal.signal(number, handler if first.number is None else signal.SIG_IGN)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block as an exit does, so that it restores the terminal."""
    before = _handled(_endings(), _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _endings() -> list[int]:
    """SIGTERM, and SIGHUP unless ``nohup`` ignores it."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _handled(numbers: Sequence[int], handler: Any) -> dict[int, Any]:
    return {number: signal.signal(number, handler) for number in numbers}


def _exit(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


class FirstSignal:
    """Acts on the first signal only: cancels the loop's tasks, or raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: Any) -> None:
        if self.number is not None:
            return
        self.number = number
        with suppress(OSError):  # the terminal may be gone
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

"""Lines for the terminal, and errors that a user can repair, without a traceback."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
    return arguments


def say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring with one line for each paragraph, so that the terminal wraps it."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

"""``python -m benchmarks``: the commands, each a function of a module of its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import typer

from benchmarks.row_files import RowsError
from deft_backend.cli.errors import help_of, reported

COMMANDS = {
    "kernel": "kernel.command",
    "mla": "latent.command",
    "papers": "papers.command",
    "invariant": "invariant",
    "policy-gaps": "policy_gaps",
    "fuzz": "fuzz.command",
    "e2e": "e2e.command",
    "load": "load",
    "soak": "soak",
    "start": "start",
    "results": "results",
}
"""Each command's module; only the one that runs is imported, because many import torch."""


def without_traceback(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose files that cannot be written end it with a message."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        with reported(RowsError):
            command(*arguments, **options)

    return run


def app_of(words: Sequence[str]) -> typer.Typer:
    """The app with the command that `words` begin with, or with all of them."""
    app = typer.Typer(
        help="Measure deft-backend: its kernels, its plans, and servers that decode with it.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,
    )
    app.callback()(lambda: None)
    chosen = [name for name in COMMANDS if name in words[:1]]
    for name in chosen or COMMANDS:
        module = import_module(f"benchmarks.{COMMANDS[name]}")
        command = getattr(module, name.replace("-", "_"))
        app.command(name, help=help_of(command))(without_traceback(command))
    return app


if __name__ == "__main__":
    app_of(sys.argv[1:])(prog_name="python -m benchmarks")

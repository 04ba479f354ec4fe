"""``python -m benchmarks``: the commands, one module each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import typer

from benchmarks.commands.e2e import e2e, e2e_merge
from benchmarks.commands.faults import faults
from benchmarks.commands.fuzz import fuzz
from benchmarks.commands.kernel import kernel, kernel_merge, kernel_plot
from benchmarks.commands.kernel_check import kernel_check
from benchmarks.commands.mla import mla
from benchmarks.commands.papers import papers
from benchmarks.commands.policies import policies
from benchmarks.commands.real_model import real_model
from benchmarks.commands.soak import soak
from benchmarks.commands.start import start
from benchmarks.commands.zoo import zoo
from benchmarks.planning import planning
from benchmarks.results import results
from benchmarks.row_files import RowsError
from deft_backend.cli.errors import help_of, reported

app = typer.Typer(
    help="Measure deft-backend: its kernels, its planners, and servers that decode with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def without_traceback(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose files that cannot be written end it with a message."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        with reported(RowsError):
            command(*arguments, **options)

    return run


for command in (
    kernel, kernel_merge, kernel_plot, kernel_check, policies, mla, papers, fuzz, faults, soak, e2e,
    e2e_merge, start, real_model, planning, zoo, results,
):  # fmt: skip
    app.command(help=help_of(command))(without_traceback(command))

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")

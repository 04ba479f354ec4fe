"""What `deft ab` prints: the tables, the notes and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deft_backend.cli.errors import say

if TYPE_CHECKING:
    from deft_backend.tools.ab.result import AbResult


_DIFFERENCES = 12  # differences that the terminal shows; the report has all of them


def print_result(result: AbResult, console: Console) -> None:
    """Print the tables, the notes about them, and the verdict."""
    from deft_backend.tools.ab.report import notes
    from deft_backend.tools.ab.tables import acceptance, differences, main_tables
    from deft_backend.tools.ab.verdict import verdict

    for title, (first, *figures), rows, _ in main_tables(result):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1),
                      pad_edge=False)  # fmt: skip
        table.add_column(first, no_wrap=True)
        for name in figures:
            table.add_column(name, justify="right", overflow="fold")  # no figure is cut
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if acceptance(result):
        say(console, f"acceptance length (tokens a verification): {acceptance(result)}")
    for note in notes(result):
        console.print(f"• {note}", markup=False, highlight=False, style="yellow")
    different = differences(result)
    for workload, request, difference in different[:_DIFFERENCES]:
        say(console, f"{workload}, {request}: {difference}")
    if different[_DIFFERENCES:]:
        say(console, f"{len(different) - _DIFFERENCES:,} more differences are in the report")
    if result.exact and any(w.agreement.compared for w in result.workloads):
        answers = sum(w.agreement.equal for w in result.workloads)
        same = f"[green]✓ all {answers} answers have the same tokens[/green]"
        console.print(same if result.same else "[bold red]✗ tokens differ[/bold red]")
    console.print(verdict(result), markup=False, highlight=False, style="bold")

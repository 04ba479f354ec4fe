"""What `deft ab` prints: the tables, the notes and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deft_backend.cli.errors import say
from deft_backend.tools.ab.units import MISSING, megabytes, percent

if TYPE_CHECKING:
    from deft_backend.tools.ab.result import AbResult


_DIFFERENCES = 12  # differences that the terminal shows; the report has all of them


def print_result(result: AbResult, console: Console) -> None:
    """Print the tables, the notes about them, and the verdict."""
    from deft_backend.tools.ab.report import acceptance, counted_side, difference_lines, notes
    from deft_backend.tools.ab.verdict import verdict

    side = counted_side(result)
    if side is not None:
        console.print(_reads(result, side))
    console.print(_times(result))
    if acceptance(result):
        say(console, f"acceptance length (tokens a verification): {acceptance(result)}")
    for note in notes(result):
        console.print(f"• {note}", markup=False, highlight=False, style="yellow")
    lines = list(difference_lines(result))
    for line in lines[:_DIFFERENCES]:
        say(console, line)
    if lines[_DIFFERENCES:]:
        say(console, f"{len(lines) - _DIFFERENCES:,} more differences are in the report")
    if result.exact and any(w.agreement.compared for w in result.workloads):
        answers = sum(w.agreement.equal for w in result.workloads)
        same = f"[green]✓ all {answers} answers have the same tokens[/green]"
        console.print(same if result.same else "[bold red]✗ tokens differ[/bold red]")
    console.print(verdict(result), markup=False, highlight=False, style="bold")


def _table(title: str, *figures: str) -> Table:
    """Each row fits one line of a terminal of 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1),
                  pad_edge=False)  # fmt: skip
    table.add_column("workload", no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")  # no figure is cut
    return table


def _reads(result: AbResult, side: int) -> Table:
    """KV reads of one side: the steps of two servers hold different requests."""
    name = result.names[side]
    table = _table("KV read per decode step, and agreement", "query by query", name, "saved",
                   "tree steps", "answers alike")  # fmt: skip
    for w in result.workloads:
        read, counted = w.kv_read(side), w.counters[side]
        table.add_row(
            w.name,
            megabytes(read.query_by_query if read else None),
            megabytes(read.read if read else None),
            percent(read.saved if read else None),
            f"{counted.steps_tree} of {counted.decode_steps}" if counted else MISSING,
            f"{w.agreement.equal} of {w.agreement.compared}",
        )
    return table


def _times(result: AbResult) -> Table:
    title = "Times (not meaningful without a GPU)" if result.on_cpu else "Times"
    table = _table(title, "server", "answered", "TTFT ms", "TPOT ms", "95 %", "tok/s")
    for w in result.workloads:
        for side, f in enumerate(w.figures):
            times = (f.ttft, f.tpot, f.tpot_p95)
            table.add_row(
                "" if side else w.name, result.names[side], f"{f.answered}/{f.requests}",
                *(MISSING if t is None else f"{1e3 * t:,.1f}" for t in times),
                MISSING if f.tokens_a_second is None else f"{f.tokens_a_second:,.0f}",
            )  # fmt: skip
    return table

"""What `deft ab` prints of a comparison over time: the table, the notes and the sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deft_backend.tools.ab.units import MISSING, percent

if TYPE_CHECKING:
    from deft_backend.tools.ab.live_result import LiveResult


def print_live(result: LiveResult, console: Console) -> None:
    """The table, what to know about it, and the sentence."""
    from deft_backend.tools.ab.live_report import notes
    from deft_backend.tools.ab.verdict import verdict

    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("workload", no_wrap=True)
    table.add_column("server", no_wrap=True)
    for name in ("answered", "TTFT ms", "TPOT ms", "95 %", "tok/s", "saved"):
        table.add_column(name, justify="right", overflow="fold")  # no figure is cut
    for w in result.workloads:
        for side, f in enumerate(w.figures):
            # Bytes of the two servers are not comparable, because their steps hold other requests.
            read, times = w.kv_read(side), (f.ttft, f.tpot, f.tpot_p95)
            table.add_row(
                "" if side else w.workload, result.names[side], f"{f.answered}/{f.requests}",
                *(MISSING if t is None else f"{1e3 * t:,.1f}" for t in times),
                MISSING if f.tokens_a_second is None else f"{f.tokens_a_second:,.0f}",
                percent(read.saved if read else None),
            )  # fmt: skip
    console.print(table)
    for note in notes(result):
        console.print(f"• {note}", markup=False, highlight=False, style="yellow")
    console.print(verdict(result), markup=False, highlight=False, style="bold")

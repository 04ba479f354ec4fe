"""Rows of the end-to-end benchmark as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.e2e.backends import HOSTS
from benchmarks.e2e.serving_bars import bars
from benchmarks.e2e.serving_rows import Row, by_case, case_name, side_of
from deft_backend.tools.ab.result import MISSING


def rows_table(rows: Sequence[Row]) -> Table:
    """One line per row, grouped by case, with the plugin's time divided by the row's."""
    table = Table(title="End to end, milliseconds", title_justify="left")
    table.add_column("workload")
    table.add_column("backend", no_wrap=True)
    for name in ("per token", "deft ÷ it", "TTFT", "TTFT p99", "gap p50", "gap p99", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for backends in by_case(rows).values():
        ours = backends.get(HOSTS[next(iter(backends.values()))["host"]].ours)
        for number, row in enumerate(backends.values()):
            name = case_name(row) if number == 0 else ""
            if row["error"]:
                said = Text(row["error"].splitlines()[0][:60], style="bold red")
                table.add_row(name, side_of(row), said)
                continue
            ratio = None
            if ours is not None and ours is not row and ours["tpot_ms"] and row["tpot_ms"]:
                ratio = ours["tpot_ms"] / row["tpot_ms"]
            table.add_row(
                name, side_of(row), _number(row["tpot_ms"], 3), _ratio(ratio),
                _number(row["ttft_ms"]), _number(row["ttft_p99_ms"]),
                _number(row["itl_p50_ms"], 2), _number(row["itl_p99_ms"], 2),
                _number(row["tokens_per_s"]),
            )  # fmt: skip
    return table


def bars_table(rows: Sequence[Row]) -> Table:
    """What a release must reach in each case, and whether it does."""
    table = Table(title="Release bars", title_justify="left")
    for name in ("workload", "must reach", "found", ""):
        table.add_column(name)
    for bar in bars(rows):
        met = Text(MISSING) if bar.met is None else _met(bar.met)
        table.add_row(bar.case, bar.asked, bar.found, met)
    return table


def _met(met: bool) -> Text:
    return Text("met", style="green") if met else Text("not met", style="bold red")


def _number(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text(MISSING)
    return Text(f"{value:.3f}", style="green" if value <= 1 else "red")

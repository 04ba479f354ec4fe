"""Rows of the kernel benchmark as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.kernel.kernel_rows import (
    Row,
    best_peer,
    geometric_mean,
    kv_dtype,
    of_roof,
    speed_up,
)
from benchmarks.kernel.methods import OURS
from deft_backend.tools.ab.result import MISSING


def means_table(rows: Sequence[Row]) -> Table:
    """Geometric means for each set, head shape and dtype of the KV cache."""
    table = Table("set", "heads", "KV cache", title="Geometric means", title_justify="left")
    for name in ("cases", "faster", "slowest case", "of roof", "best peer of roof"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["heads"], kv_dtype(row)), []).append(row)
    for key, found in groups.items():
        ratios = [ratio for row in found if (ratio := speed_up(row))]
        peers = [of_roof(row, peer[0]) for row in found if (peer := best_peer(row))]
        table.add_row(
            *key,
            str(len(found)),
            _ratio(geometric_mean(ratios)),
            _ratio(min(ratios, default=None)),
            _number(geometric_mean(of_roof(row) for row in found), 2),
            _number(geometric_mean(peers), 2),
        )
    return table


def row_line(row: Row) -> str:
    """One case as a line of a log."""
    times = "  ".join(f"{name} {_number(us)}" for name, us in row["us"].items())
    cache = f" KV cache {kv_dtype(row)}" if kv_dtype(row) != row["dtype"] else ""
    return (
        f"{row['set']}  {row['workload']}  {row['heads']} page {row['page_size']}{cache}: "
        f"roof {_number(row['roof_us'])}  {times}  error {_error(row['error'].get(OURS))}"
    )


def _number(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _error(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1e}"


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text(MISSING)
    return Text(f"{value:.2f}×", style="green" if value >= 1 else "red")

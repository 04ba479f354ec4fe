"""Times of every policy over `auto`'s, from files that ``kernel --policies`` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kernel.kernel_rows import geometric_mean

MOST = 1.02
"""`auto` should take at most so many times the fastest policy's time, on every row."""

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Geometric means of each policy's time over `auto`'s as a table in Markdown.

    A policy that did not run on a tree is left out there.
    """
    by: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by.setdefault((row["planner"], row["heads"]), []).append(row)
    heads = [f"{planner} plans, {of}: {len(mine)} trees" for (planner, of), mine in by.items()]
    lines = [f"| policy | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    means = {
        name: [_mean(name, mine) for mine in by.values()]
        for name in dict.fromkeys(name for row in rows for name in row["us"])
    }
    for name in sorted(means, key=lambda name: (name != "auto", means[name][0])):
        figures = ("1" if name == "auto" else f"{mean:.2f}" for mean in means[name])
        lines.append(f"| `{name}` | {' | '.join(figures)} |")
    return "\n".join(lines)


def slower(rows: Sequence[Row]) -> list[str]:
    """The rows on which `auto` takes more than :data:`MOST` times the fastest policy's time."""
    found = []
    for row in rows:
        times = {name: us for name, us in row["us"].items() if us}
        best = min(times, key=lambda name: times[name])
        ratio = times["auto"] / times[best]
        if ratio > MOST:
            case = f"{row['planner']}, {row['heads']}, {row['set']}, {row['tree']}"
            found.append(f"{case}: {ratio:.3f} of {best}'s time")
    return found


def _mean(name: str, rows: Sequence[Row]) -> float:
    ratios = [row["us"][name] / row["us"]["auto"] for row in rows if row["us"].get(name)]
    return geometric_mean(ratios) or float("nan")

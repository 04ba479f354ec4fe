"""The README's figure: time per output token of each backend, a group of bars for each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.e2e.launch import HOSTS
from benchmarks.e2e.rows import Row, by_case, read_rows
from deft_backend.hosts.windows import TESTED
from deft_backend.tools.servers.command import BACKEND

OURS_COLOUR = "#c2410c"
OTHER_COLOURS = ("#64748b", "#94a3b8", "#cbd5e1", "#e2e8f0")

STYLE = {
    "font.size": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "deft",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#52606d",
    "axes.axisbelow": True,
}


def draw(record: Path) -> Path:
    """Draw a record's batches next to it; equal records give equal files with one matplotlib."""
    import matplotlib

    rows, header = read_rows(record)
    cases = list(
        by_case(row for row in rows if row["tpot_ms"] and row["prefix"] is not None).values()
    )
    with matplotlib.rc_context(STYLE):
        path = record.with_suffix(".svg")
        _bars(cases, header).savefig(path, metadata={"Date": None}, facecolor="white")
    return path


def _bars(cases: Sequence[dict[str, Row]], header: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    first = next(iter(cases[0].values()))
    ours = HOSTS[first["host"]].ours
    names = sorted(dict.fromkeys(name for case in cases for name in case), key=lambda n: n == ours)
    figure = Figure(figsize=(max(4.5, 1.5 * len(cases)), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * width
        found = [
            (at, case[name]["tpot_ms"] or 0.0) for at, case in enumerate(cases) if name in case
        ]
        drawn = axes.bar(
            [at + shift for at, _ in found],
            [time for _, time in found],
            width * 0.92,
            color=OURS_COLOUR if name == ours else OTHER_COLOURS[number],
            label=f"{TESTED[first['host']].name}, {BACKEND if name == ours else name}",
        )
        axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
    axes.set_xticks(range(len(cases)), [_words(next(iter(case.values()))) for case in cases])
    axes.set_ylabel("ms per output token")
    device = str(header.get("device", "")).split(" (")[0]
    axes.set_title(f"{first['model']}, {device}", fontsize=9, loc="left")
    axes.legend(frameon=False)
    return figure


def _words(row: Row) -> str:
    """The case in two lines."""
    requests = "request" if row["branches"] == 1 else "requests"
    if row["workload"] == "unshared":
        return f"nothing shared\n{row['branches']} × {row['suffix']:,}"
    return f"{row['prefix']:,} shared\n× {row['branches']} {requests}"

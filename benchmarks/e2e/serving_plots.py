"""Plots of a file of rows: time per output token for each case, and step times of the trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style
from benchmarks.e2e.backends import HOSTS
from benchmarks.e2e.serving_rows import Row, by_case
from deft_backend.tools.servers.command import BACKEND, HOST_NAMES

OURS_COLOUR = "#c2410c"
OTHER_COLOURS = ("#64748b", "#94a3b8", "#cbd5e1", "#e2e8f0")


def draw(rows: Sequence[Row], header: dict[str, Any], beside: Path) -> list[Path]:
    """Draw the rows into files next to `beside`; returns the files.

    ``.svg`` has a group of bars for each case that was sent together. ``-trees.svg`` has a panel
    for each replayed tree. Rows without figures are left out.
    """
    cases = by_case(row for row in rows if not row["error"] and row["tpot_ms"])
    together = [
        c for c in cases.values()
        if _first(c)["prefix"] is not None and _first(c)["workload"] != "scheduler"
    ]  # fmt: skip
    trees = [c for c in cases.values() if "steps_ms" in _first(c)["detail"]]
    made = []
    with plot_style.style():
        for suffix, chosen, draw_one in ((".svg", together, _bars), ("-trees.svg", trees, _steps)):
            if chosen:
                path = beside.with_name(beside.stem + suffix)
                made.append(plot_style.save(draw_one(chosen, header), path))
    return made


def _bars(cases: Sequence[dict[str, Row]], header: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    names = _backends(cases)
    figure = Figure(figsize=(max(4.5, 1.5 * len(cases)), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * width
        found = [
            (at, case[name]["tpot_ms"] or 0.0) for at, case in enumerate(cases) if name in case
        ]
        drawn = axes.bar(
            [at + shift for at, _ in found], [time for _, time in found], width * 0.92,
            color=_colour(names, name), label=_label(cases, name),
        )  # fmt: skip
        axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
    axes.set_xticks(range(len(cases)), [_words(_first(case)) for case in cases])
    axes.set_ylabel("ms per output token")
    axes.set_title(_title(cases, header), fontsize=9, loc="left")
    axes.legend(frameon=False)
    return figure


def _steps(cases: Sequence[dict[str, Row]], header: dict[str, Any]) -> Any:
    from matplotlib.figure import Figure

    names = _backends(cases)
    figure = Figure(figsize=(9.0, 1.9 * len(cases) + 0.5), layout="constrained")
    panels = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, case in zip(panels, cases, strict=True):
        for name in names:
            if name in case:
                steps = case[name]["detail"]["steps_ms"]
                axes.plot(
                    steps["iteration"], steps["ms"], color=_colour(names, name), linewidth=1.0,
                    label=_label(cases, name),
                )  # fmt: skip
        axes.set_title(_first(case)["workload"], fontsize=8, loc="left")
        axes.set_ylabel("ms per step")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("iteration of the tree")
    panels[0].legend(frameon=False, ncols=len(names), fontsize=7)
    figure.suptitle(_title(cases, header), fontsize=9, x=0.01, ha="left")
    return figure


def _first(case: dict[str, Row]) -> Row:
    return next(iter(case.values()))


def _backends(cases: Sequence[dict[str, Row]]) -> list[str]:
    """All backends. The plugin's comes last, so it is drawn over the others."""
    ours = HOSTS[_first(cases[0])["host"]].ours
    names = dict.fromkeys(name for case in cases for name in case)
    return sorted(names, key=lambda name: name == ours)


def _colour(names: Sequence[str], name: str) -> str:
    if name == names[-1] and name in {host.ours for host in HOSTS.values()}:
        return OURS_COLOUR
    return OTHER_COLOURS[names.index(name) % len(OTHER_COLOURS)]


def _label(cases: Sequence[dict[str, Row]], name: str) -> str:
    host = HOSTS[_first(cases[0])["host"]]
    return f"{HOST_NAMES[host.name]}, {BACKEND if name == host.ours else name}"


def _words(row: Row) -> str:
    """The case in two lines."""
    requests = "request" if row["branches"] == 1 else "requests"
    if row["workload"] == "unshared":
        return f"nothing shared\n{row['branches']} × {row['suffix']:,}"
    if row["workload"] == "few-shot":
        return f"{row['prefix']:,} shared\n× {row['branches']} {requests}"
    return f"{row['workload'].split(' (')[0]}\n{row['prefix']:,} × {row['branches']}"


def _title(cases: Sequence[dict[str, Row]], header: dict[str, Any]) -> str:
    row, device = _first(cases[0]), str(header.get("device", "")).split(" (")[0]
    gpus = f" × {row['tp']}" if row["tp"] > 1 else ""
    return f"{row['model']}, {device}{gpus}"

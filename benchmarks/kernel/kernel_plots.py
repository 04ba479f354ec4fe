"""Plots of a run's rows: speed-up for each tree, and distance to the roof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style
from benchmarks.kernel.kernel_rows import Row, best_peer, geometric_mean, of_roof, speed_up
from benchmarks.kernel.methods import OURS
from benchmarks.kernel.tree_workloads import TRACES

# The palette of Okabe and Ito, for every kind of colour vision.
OURS_COLOUR = "#0072B2"
PEER_COLOUR = "#E69F00"
SLOWER_COLOUR = "#D55E00"
ROOF_COLOUR = "#000000"
_TREE_SETS = ("fasttree", "deft")
_FULL_NAMES = {
    "fasttree": "FastTree", "deft": "DeFT", "flashforge": "FlashForge", "unshared": "unshared",
    "mixed": "mixed", "traces": "recorded", "tiny": "tiny", "own": "own",
}  # fmt: skip


def draw(rows: Sequence[Row], header: dict[str, Any], beside: Path) -> list[Path]:
    """Draw the rows into files next to `beside`; returns the files.

    ``-trees.svg`` shows FastTree's and DeFT's trees, one panel per head shape. ``-families.svg``
    shows the other sets. ``-roof.svg`` shows the fraction of the roof against sharing. Rows without
    a time of deft are left out.
    """
    timed = [row for row in rows if row["us"].get(OURS) is not None and row["roof_us"]]
    trees = [row for row in timed if row["set"] in _TREE_SETS]
    families = [row for row in timed if row["set"] not in _TREE_SETS]
    made = []
    with plot_style.style():
        for name, chosen, draw_one in (
            ("trees", trees, _speed_ups),
            ("families", families, _speed_ups),
            ("roof", timed, _roof),
        ):
            drawn = draw_one(chosen, header) if chosen else None
            if drawn is not None:
                path = beside.with_name(f"{beside.stem}-{name}.svg")
                made.append(plot_style.save(drawn, path))
    return made


def _speed_ups(rows: Sequence[Row], header: dict[str, Any]) -> Any:
    """Bars: speed-up over the fastest peer, with a mark at the roof's limit.

    The steps of a recording share one bar, their geometric mean.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if best_peer(row)]
    if not rows:
        return None
    shapes = list(dict.fromkeys(row["heads"] for row in rows))
    labels = list(dict.fromkeys(_label(row) for row in rows))
    figure = Figure(
        figsize=(3.4 + 3.2 * len(shapes), 1.5 + 0.23 * len(labels)), layout="constrained"
    )
    panels: Any = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        found = {label: _of(rows, shape, label) for label in labels}
        at = [y for y, label in enumerate(labels) if found[label]]
        ratios = [geometric_mean(map(speed_up, found[labels[y]])) or 0.0 for y in at]
        limits = [geometric_mean(map(_limit, found[labels[y]])) or 0.0 for y in at]
        colours = [OURS_COLOUR if ratio >= 1 else SLOWER_COLOUR for ratio in ratios]
        axes.barh(at, ratios, 0.68, color=colours)
        axes.scatter(limits, at, marker="|", s=60, linewidths=1.4, color=ROOF_COLOUR, zorder=3)
        for y, ratio in zip(at, ratios, strict=True):  # in a column of its own, which no bar covers
            axes.text(
                1.0, y, f"{ratio:.2f}×", transform=axes.get_yaxis_transform(), ha="right",
                va="center", fontsize=8, color=OURS_COLOUR if ratio >= 1 else SLOWER_COLOUR,
            )  # fmt: skip
        axes.axvline(1, color="#52606d", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        low, high = min(0.8, *ratios) * 0.9, max([*limits, *ratios]) * 1.15
        axes.set_xlim(low, high * (high / low) ** 0.2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_xticks([t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if low <= t <= high])
        axes.minorticks_off()
        axes.grid(axis="x", color="#e4e7eb", linewidth=0.7)
        axes.set_title(f"heads {shape}", loc="left", fontsize=9)
        axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(labels) - 0.4, -0.6)
    figure.supxlabel("times faster than the fastest correct peer    ( ❘  the roof )", fontsize=9)
    figure.suptitle(
        f"Decode attention, tree by tree · {_where(rows, header)}", fontsize=10, x=0.01, ha="left"
    )
    return figure


def _roof(rows: Sequence[Row], header: dict[str, Any]) -> Any:
    """Points: fraction of the roof against sharing, for deft and for the fastest peer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axes: Any = figure.subplots()
    for row in rows:
        if peer := best_peer(row):
            ends = [of_roof(row, peer[0]), of_roof(row)]
            axes.plot([row["share"]] * 2, ends, color="#cbd2d9", linewidth=0.8, zorder=1)
    compared = [row for row in rows if best_peer(row)]
    axes.scatter(
        [row["share"] for row in compared],
        [of_roof(row, (best_peer(row) or ("", 0))[0]) for row in compared],
        s=22, marker="s", color=PEER_COLOUR, edgecolors="white", linewidths=0.5, zorder=2,
        label="fastest correct peer",
    )  # fmt: skip
    axes.scatter(
        [row["share"] for row in rows], [of_roof(row) for row in rows], s=30, color=OURS_COLOUR,
        edgecolors="white", linewidths=0.5, zorder=3, label=OURS,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, max(1.02, *(of_roof(row) or 0 for row in rows)))
    axes.grid(color="#e4e7eb", linewidth=0.7)
    axes.set_xlabel("sharing: tokens attended ÷ tokens stored")
    axes.set_ylabel("fraction of the roof")
    axes.set_title(f"How close to the roof · {_where(rows, header)}", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper right")
    return figure


def _limit(row: Row) -> float:
    """The speed-up at which deft would reach the roof."""
    peer, roof = best_peer(row), row["roof_us"]
    assert peer is not None
    assert roof is not None
    return peer[1] / roof


def _of(rows: Sequence[Row], heads: str, label: str) -> list[Row]:
    """The rows of one bar; the steps of a recording are several."""
    return [row for row in rows if row["heads"] == heads and _label(row) == label]


def _label(row: Row) -> str:
    name = row["workload"].split("@")[0] if row["set"] == TRACES else row["workload"]
    return f"{_FULL_NAMES.get(row['set'], row['set'])}  {name}"


def _where(rows: Sequence[Row], header: dict[str, Any]) -> str:
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    return f"{str(header.get('device', 'unknown device')).split(' (')[0]} · {dtypes}"

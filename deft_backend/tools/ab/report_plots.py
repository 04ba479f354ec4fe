"""The report's plots: matplotlib draws them as SVG data for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from deft_backend.tools.ab.comparison import AbResult

HOST_COLOUR = "#9aa5b1"
DEFT_COLOUR = "#1f6feb"


def kv_plot(result: AbResult) -> str:
    """A plot as a ``data:`` address: KV bytes of a decode step, query by query and by deft."""
    names = [w.workload for w in result.workloads]
    reads = [w.kv_read for w in result.workloads]
    whole = [read.query_by_query / 1e6 if read else 0.0 for read in reads]
    deft = [read.deft / 1e6 if read else 0.0 for read in reads]
    return _bars("KV cache read per decode step", "MB", names, whole, deft, "query by query")


def tpot_plot(result: AbResult) -> str:
    """Median time per output token; a ``data:`` address."""
    names = [w.workload for w in result.workloads]
    host = [(w.host.tpot or 0.0) * 1e3 for w in result.workloads]
    deft = [(w.deft.tpot or 0.0) * 1e3 for w in result.workloads]
    return _bars("Time per output token (median)", "ms", names, host, deft)


def ttft_plot(result: AbResult) -> str:
    """Median time to first token; a ``data:`` address."""
    names = [w.workload for w in result.workloads]
    host = [w.host.ttft * 1e3 for w in result.workloads]
    deft = [w.deft.ttft * 1e3 for w in result.workloads]
    return _bars("Time to first token (median)", "ms", names, host, deft)


def _bars(
    title: str,
    unit: str,
    names: Sequence[str],
    host: Sequence[float],
    deft: Sequence[float],
    host_label: str = "host",
) -> str:
    import matplotlib

    # Create the figure without pyplot, which would need a display and global state.
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "deft", "font.size": 10}):
        figure = Figure(figsize=(6.4, 0.75 * len(names) + 1.3), layout="constrained")
        axes = figure.subplots()
        at = range(len(names))
        for shift, values, colour, label in (
            (-0.19, host, HOST_COLOUR, host_label),
            (0.19, deft, DEFT_COLOUR, "deft"),
        ):
            bars = axes.barh([y + shift for y in at], values, 0.36, color=colour, label=label)
            axes.bar_label(bars, labels=[_label(v) for v in values], padding=3)
        axes.set_yticks(list(at), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.14 * max([*host, *deft, 1e-9]))
        axes.set_xlabel(unit)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.12), ncols=2)
        return svg_address(figure)


def _label(value: float) -> str:
    if not value:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def svg_address(figure: Any) -> str:
    """A figure as a ``data:`` address."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

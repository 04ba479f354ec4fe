"""Plots of a comparison: KV reads, distributions of times, and tokens a second."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

from deft_backend.tools.ab.result import AbResult, ComparedWorkload
from deft_backend.tools.harness.replay import Replayed

_COLOURS = ("#9aa5b1", "#1f6feb")
_BINS = 60


def kv_plot(result: AbResult, side: int) -> str:
    """KV read by a decode step of one side, and query by query; a ``data:`` address."""
    names = [w.name for w in result.workloads]
    reads = [w.kv_read(side) for w in result.workloads]
    bars = (
        ("query by query", [read.query_by_query / 1e6 if read else 0.0 for read in reads]),
        (result.names[side], [read.read / 1e6 if read else 0.0 for read in reads]),
    )
    with _style():
        figure = _figure(8.0, 0.6 * len(names) + 1.2)
        axes = figure.subplots()
        for shift, (label, values), colour in zip((-0.19, 0.19), bars, _COLOURS, strict=True):
            places = [at + shift for at in range(len(names))]
            drawn = axes.barh(places, values, 0.36, color=colour, label=label)
            axes.bar_label(drawn, labels=[f"{v:.3g}" if v else "–" for v in values], padding=3)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.14 * max(*bars[0][1], *bars[1][1], 1e-9))
        axes.set_xlabel("MB")
        axes.set_title("KV cache read per decode step", loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 1.12), ncols=2)
        return _address(figure)


def time_plots(w: ComparedWorkload, names: tuple[str, str]) -> str:
    """First tokens, time per token and tokens a second of a workload; a ``data:`` address."""
    answers = [[o.answer for o in run.outcomes if o.answer is not None] for run in w.runs]
    with _style():
        figure = _figure(11.0, 2.7)
        first, token, flow = figure.subplots(1, 3)
        ttft = [[answer.ttft for answer in side] for side in answers]
        tpot = [[t for answer in side if (t := answer.tpot) is not None] for side in answers]
        _distributions(first, ttft, names, "time to first token")
        _distributions(token, tpot, names, "time per output token")
        _flow(flow, w.runs, names)
        for axes in (first, token, flow):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        first.legend(frameon=False, loc="lower right")
        return _address(figure)


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "deft", "font.size": 9})


def _figure(width: float, height: float) -> Any:
    # Not through pyplot, which would need a display and global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _distributions(
    axes: Any, values: Sequence[Sequence[float]], names: Sequence[str], title: str
) -> None:
    """Share of requests at or below each time; a logarithmic axis where times differ much."""
    from matplotlib.ticker import PercentFormatter

    every = [1e3 * value for side in values for value in side]
    for side, name, colour in zip(values, names, _COLOURS, strict=True):
        if side:
            axes.ecdf([1e3 * value for value in side], color=colour, label=name, linewidth=1.8)
    if every and min(every) > 0 and max(every) > 20 * min(every):
        _logarithmic(axes, decades=math.log10(max(every) / min(every)))
    axes.set_ylim(0, 1.01)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.set_xlabel("ms")
    axes.set_ylabel("% of answers")
    axes.set_title(title, loc="left", fontweight="bold")


def _logarithmic(axes: Any, decades: float) -> None:
    """A logarithmic axis with few labels, in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _flow(axes: Any, runs: Sequence[Replayed], names: Sequence[str]) -> None:
    """Tokens that arrive in each second, of all answers."""
    end = max(0.1 * _BINS, *(run.seconds for run in runs))
    for run, name, colour in zip(runs, names, _COLOURS, strict=True):
        times = [
            o.sent + at for o in run.outcomes if o.answer is not None for at in o.answer.arrivals
        ]
        rates = [_BINS / end] * len(times)
        axes.hist(times, _BINS, range=(0.0, end), weights=rates, histtype="step", color=colour,
                  label=name, linewidth=1.4)  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_title("tokens a second over time", loc="left", fontweight="bold")


def _address(figure: Any) -> str:
    """A figure as a ``data:`` address."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

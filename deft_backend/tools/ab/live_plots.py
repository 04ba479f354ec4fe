"""Plots of a comparison over time: distributions of times, and tokens a second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deft_backend.tools.ab.live_result import LiveWorkload
from deft_backend.tools.ab.report_plots import DEFT_COLOUR, HOST_COLOUR, svg_address
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.replay import Replayed

_COLOURS = (HOST_COLOUR, DEFT_COLOUR)
_BINS = 60
_POINTS = 400
"""Points of a distribution that are drawn, at most."""


def live_plot(w: LiveWorkload, names: tuple[str, str]) -> str:
    """Three plots of one workload: first tokens, time per token, tokens a second; an address."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "deft", "font.size": 9}):
        figure = Figure(figsize=(11.0, 2.7), layout="constrained")
        first, token, flow = figure.subplots(1, 3)
        _distributions(first, [_ttft(run) for run in w.runs], names, "time to first token")
        _distributions(token, [_tpot(run) for run in w.runs], names, "time per output token")
        _flow(flow, w.runs, names)
        for axes in (first, token, flow):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        first.legend(frameon=False, loc="lower right")
        return svg_address(figure)


def _distributions(
    axes: Any, values: Sequence[Sequence[float]], names: Sequence[str], title: str
) -> None:
    """Share of requests at or below each time; a logarithmic axis where times differ much."""
    every = [1e3 * value for side in values for value in side]
    for side, name, colour in zip(values, names, _COLOURS, strict=True):
        ordered = sorted(1e3 * value for value in side)
        step = max(1, len(ordered) // _POINTS)
        places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
        shares = [100 * (at + 1) / len(ordered) for at in places]
        axes.step(
            [ordered[at] for at in places],
            shares,
            where="post",
            color=colour,
            label=name,
            linewidth=1.8,
        )
    if every and min(every) > 0 and max(every) > 20 * min(every):
        _logarithmic(axes, decades=math.log10(max(every) / min(every)))
    axes.set_ylim(0, 101)
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
    longest = max((run.seconds for run in runs), default=0.0)
    width = max(longest / _BINS, 0.1)
    for run, name, colour in zip(runs, names, _COLOURS, strict=True):
        counts = [0] * (math.ceil(longest / width) + 1)
        for outcome in run.outcomes:
            if outcome.answer is not None:
                for at in outcome.answer.arrivals:
                    counts[min(len(counts) - 1, int((outcome.sent + at) / width))] += 1
        last = math.ceil(run.seconds / width) + 1
        rates = [count / width for count in counts[:last]]
        axes.step([at * width for at in range(len(rates))], rates, where="post", color=colour,
                  label=name, linewidth=1.4)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_title("tokens a second over time", loc="left", fontweight="bold")


def _answers(run: Replayed) -> list[Answer]:
    return [o.answer for o in run.outcomes if o.answer is not None]


def _ttft(run: Replayed) -> list[float]:
    return [answer.ttft for answer in _answers(run)]


def _tpot(run: Replayed) -> list[float]:
    return [tpot for answer in _answers(run) if (tpot := answer.tpot) is not None]

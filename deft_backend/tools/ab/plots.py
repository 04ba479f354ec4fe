"""The plot of a workload: the distributions of its times on both servers."""

import base64
import io

from deft_backend.tools.ab.result import ComparedWorkload

_COLOURS = ("#9aa5b1", "#1f6feb")


def time_plot(w: ComparedWorkload, names: tuple[str, str]) -> str:
    """Shares of the answers at or below each time; a ``data:`` address."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would need a display and global state
    from matplotlib.ticker import PercentFormatter

    answers = [[o.answer for o in run.outcomes if o.answer is not None] for run in w.runs]
    ttft = [[1e3 * answer.ttft for answer in side] for side in answers]
    tpot = [[1e3 * t for answer in side if (t := answer.tpot) is not None] for side in answers]
    style = {"svg.fonttype": "none", "svg.hashsalt": "deft", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.0, 2.7), layout="constrained")
        for axes, times, title in zip(
            figure.subplots(1, 2), (ttft, tpot), ("time to first token", "time per output token"),
            strict=True,
        ):  # fmt: skip
            for side, name, colour in zip(times, names, _COLOURS, strict=True):
                if side:
                    axes.ecdf(side, color=colour, label=name, linewidth=1.8)
            axes.set_ylim(0, 1.01)
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
            axes.set_xlabel("ms")
            axes.set_ylabel("% of answers")
            axes.set_title(title, loc="left", fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            if any(times):
                axes.legend(frameon=False, loc="lower right")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()

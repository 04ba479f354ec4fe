"""An A/B result in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from deft_backend.tools.ab.comparison import AbResult
from deft_backend.tools.ab.units import MISSING, megabytes, milliseconds, percent

_PADDING = (0, 0, 0, 1)
"""Top, right, bottom, left: each result fits one line of a terminal of 80 columns."""


def result_tables(result: AbResult) -> Iterator[Table]:
    """The exact figures, then the times (dimmed without a GPU, where they mean nothing)."""
    yield _reads(result)
    yield _times(result)


def _reads(result: AbResult) -> Table:
    table = Table(
        title="KV read per decode step, and agreement", title_justify="left", box=SIMPLE_HEAD,
        padding=_PADDING,
    )  # fmt: skip
    table.add_column("workload", no_wrap=True, min_width=18)
    for name in ("query by query", "deft", "saved", "steps by tree", "answers alike"):
        table.add_column(name, justify="right")
    for w in result.workloads:
        counters, read = w.deft.counters, w.kv_read
        saved = percent(read.saved if read else None)
        table.add_row(
            w.workload,
            megabytes(read.query_by_query if read else None),
            megabytes(read.deft if read else None),
            f"[green]{saved}[/green]" if read and read.saved else saved,
            f"{counters.steps_tree} of {counters.decode_steps}" if counters else MISSING,
            Text(
                f"{w.agreement.equal} of {w.agreement.answers}",
                style="green" if w.agreement.same else "bold red",
            ),
        )
    return table


def _times(result: AbResult) -> Table:
    title = "Times" if result.on_gpu else "Times (not meaningful without a GPU)"
    style = "" if result.on_gpu else "dim"
    table = Table(title=title, title_justify="left", style=style, box=SIMPLE_HEAD, padding=_PADDING)
    table.add_column("workload", style=style, no_wrap=True, min_width=18)
    names = ("TPOT host", "TPOT deft", "TTFT host", "TTFT deft", "tok/s host", "tok/s deft")
    for name in names:
        table.add_column(name, justify="right", style=style, header_style=style)
    for w in result.workloads:
        table.add_row(
            w.workload,
            milliseconds(w.host.tpot),
            milliseconds(w.deft.tpot),
            milliseconds(w.host.ttft),
            milliseconds(w.deft.ttft),
            f"{w.host.tokens_a_second:,.1f}",
            f"{w.deft.tokens_a_second:,.1f}",
        )
    return table


def acceptance_line(result: AbResult) -> str | None:
    """How many tokens the verifications gave; None if no server speculated."""
    if result.acceptance_length is None:
        return None
    lengths = ", ".join(
        f"{side} {MISSING if length is None else f'{length:.2f}'}"
        for side, length in result.acceptance_length.items()
    )
    return f"acceptance length (tokens a verification): {lengths}"


def divergence_lines(result: AbResult) -> Iterator[Text]:
    """One line for each answer that differs."""
    for w in result.workloads:
        for d in w.agreement.divergences:
            yield Text(
                f"{w.workload}, {d.answer}: after {d.position} tokens the host says "
                f"{d.host_token!r} ({d.host_logprob:.3f}), deft {d.deft_token!r} "
                f"({d.deft_logprob:.3f}); gap {d.gap:.2g}, the host's own margin {d.margin:.2g}"
            )
        if w.agreement.not_compared:
            yield Text(f"{w.workload}: {w.agreement.not_compared} answers go on from those")

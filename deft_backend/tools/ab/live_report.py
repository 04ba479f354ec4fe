"""The report of a comparison over time: a self-contained page, and the JSON behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from deft_backend.files.private_files import write_private
from deft_backend.tools.ab.live_agreement import CLOSE
from deft_backend.tools.ab.live_plots import live_plot
from deft_backend.tools.ab.live_result import LiveResult, LiveWorkload
from deft_backend.tools.ab.live_run import MARGINS
from deft_backend.tools.ab.report import CPU_TIMES, fill_page, table_rows
from deft_backend.tools.ab.units import MISSING, megabytes, milliseconds, percent
from deft_backend.tools.ab.verdict import paired_change, verdict
from deft_backend.tools.harness.live_request import ANSWERED, STATUSES

_LATE = 0.05
"""Seconds. If requests leave the client later than this, the times include the client's delay."""

_DETAILS = 5


def write_live_report(result: LiveResult, folder: Path, command: str) -> tuple[Path, Path]:
    """Write ``report.html`` and ``results.json`` into `folder`; returns both paths."""
    page, data = folder / "report.html", folder / "results.json"
    content = {**result.to_json(), "verdict": verdict(result), "command": command}
    write_private(data, json.dumps(content) + "\n")
    write_private(page, _page(result, command))
    return page, data


def notes(result: LiveResult) -> Iterator[str]:
    """What a reader must know about the figures."""
    if result.on_cpu:
        yield CPU_TIMES
    if result.interrupted:
        yield "The run was interrupted. The figures hold what was measured until then."
    for side in result.sides:
        for run in side.runs:
            if run.died:
                yield f"{side.name}: {run.died}. No further requests were sent."
        if not side.offers.exact_lengths:
            yield (f"{side.name} does not take ignore_eos, so an answer may end before its length.")
    for w in result.workloads:
        for name, figures in zip(result.names, w.figures, strict=True):
            if figures.late_p95 is not None and figures.late_p95 > _LATE:
                yield (
                    f"{w.workload}, {name}: the client itself sent 5 % of the requests more than "
                    f"{milliseconds(figures.late_p95)} late. Use a faster machine or a lower rate."
                )
            too_long = figures.lost.get("too long", 0)
            if too_long:
                yield (
                    f"{w.workload}, {name}: {too_long:,} of {figures.requests:,} requests do not "
                    "fit the server's context and were not answered."
                )


def _page(result: LiveResult, command: str) -> str:
    first, second = map(escape, result.names)
    said = "".join(f"<p>{escape(note)}</p>" for note in notes(result))
    models = dict.fromkeys(side.offers.model for side in result.sides)
    return fill_page(
        "live_report.html",
        first=first,
        second=second,
        model=escape(" · ".join(models)),
        date=escape(str(result.provenance.get("date", ""))),
        verdict=escape(verdict(result)),
        notes=f"<div class='note'>{said}</div>" if said else "",
        figures=table_rows(row for w in result.workloads for row in _figures(result, w)),
        changes=table_rows(_change(w) for w in result.workloads),
        plots="".join(_plot(result, w) for w in result.workloads),
        agreement=table_rows(_agreement(w) for w in result.workloads),
        close=f"{max((w.agreement.close for w in result.workloads), default=CLOSE):g}",
        margins=str(MARGINS),
        statuses="".join(f"<th>{status}</th>" for status in STATUSES),
        outcomes=table_rows(row for w in result.workloads for row in _outcomes(result, w)),
        details=_details(result),
        steps=table_rows(row for w in result.workloads for row in _steps(result, w)),
        workloads=table_rows(
            [w.workload, f"{w.description}; arrivals: {w.arrivals}"] for w in result.workloads
        ),
        servers=table_rows(_servers(result)),
        command=escape(command),
    )


def _plot(result: LiveResult, w: LiveWorkload) -> str:
    name = escape(w.workload)
    try:
        address = live_plot(w, result.names)
    except ImportError:
        return f"<p>{name}: no plots, because matplotlib is not installed here.</p>"
    return (
        f"<figure><img src='{address}' alt='Distributions of {name}'><figcaption>{name}: "
        f"{escape(w.arrivals)}</figcaption></figure><br>"
    )


def _figures(result: LiveResult, w: LiveWorkload) -> Iterator[list[str]]:
    for side, figures in enumerate(w.figures):
        read = w.kv_read(side)
        yield [
            "" if side else w.workload,
            result.names[side],
            f"{figures.answered:,} of {figures.requests:,}",
            milliseconds(figures.ttft),
            milliseconds(figures.ttft_p95),
            milliseconds(figures.tpot),
            milliseconds(figures.tpot_p95),
            MISSING if figures.tokens_a_second is None else f"{figures.tokens_a_second:,.1f}",
            megabytes(read.query_by_query if read else None),
            megabytes(read.deft if read else None),
            percent(read.saved if read else None),
        ]


def _change(w: LiveWorkload) -> list[str]:
    change = paired_change(w)
    if change is None:
        return [w.workload, "too few answers", MISSING]
    middle, low, high = (f"{100 * value:+.1f} %" for value in change)
    return [w.workload, middle, f"{low} to {high}"]


def _agreement(w: LiveWorkload) -> list[str]:
    a = w.agreement
    checked = [d for d in a.differences if d.margin is not None]
    numbers = (
        a.compared, a.equal, len(a.differences), len(checked) - a.unexplained, a.unexplained,
        len(a.differences) - len(checked),
    )  # fmt: skip
    return [w.workload, *(f"{number:,}" for number in numbers)]


def _outcomes(result: LiveResult, w: LiveWorkload) -> Iterator[list[str]]:
    for side, figures in enumerate(w.figures):
        counts = {ANSWERED: figures.answered, **figures.lost}
        name = result.names[side]
        yield ["" if side else w.workload, name, *(f"{counts.get(s, 0):,}" for s in STATUSES)]


def _details(result: LiveResult) -> str:
    """The first few requests that were not answered, in the servers' words."""
    rows = [
        [w.workload, name, o.name, o.status, o.detail]
        for w in result.workloads
        for name, run in zip(result.names, w.runs, strict=True)
        for o in [o for o in run.outcomes if o.status != ANSWERED][:_DETAILS]
    ]
    if not rows:
        return ""
    return (
        f"<p>The first ones without an answer:</p><table><tbody>{table_rows(rows)}</tbody></table>"
    )


def _steps(result: LiveResult, w: LiveWorkload) -> Iterator[list[str]]:
    for side, counters in enumerate(w.counters):
        head = ["" if side else w.workload, result.names[side]]
        if counters is None:
            yield [*head, *[MISSING] * 3]
            continue
        reasons = "; ".join(f"{reason}: {n:,}" for reason, n in counters.steps_host.items())
        yield [*head, f"{counters.decode_steps:,}", f"{counters.steps_tree:,}", reasons or "0"]


def _servers(result: LiveResult) -> Iterator[list[str]]:
    for side in result.sides:
        offers = side.offers
        context = "unknown" if offers.context is None else f"{offers.context:,} tokens"
        backend = f", attention backend {side.backend}" if side.backend else ""
        device = f", on {side.device}" if side.device else ""
        yield [side.name, f"{side.url}: {offers.model}, context {context}{backend}{device}"]

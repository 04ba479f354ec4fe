"""The report of a comparison: a self-contained page, and the JSON behind it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from deft_backend.files.private_files import write_private
from deft_backend.tools.ab.agreement import CLOSE
from deft_backend.tools.ab.plots import kv_plot, time_plots
from deft_backend.tools.ab.result import AbResult, ComparedWorkload
from deft_backend.tools.ab.run import MARGINS
from deft_backend.tools.ab.units import MISSING, megabytes, milliseconds, percent
from deft_backend.tools.ab.verdict import paired_change, verdict
from deft_backend.tools.harness.streamed_request import ANSWERED, STATUSES

_CPU_NOTE = (
    "Times on this machine mean nothing: there is no GPU, and the kernels run in Triton's "
    "interpreter. The KV figures are exact: the plugin counts the bytes that decode attention "
    "reads, and the same plan reads the same bytes on a GPU. (The policy auto plans for its "
    "device, so a GPU may treat very small batches otherwise.)"
)

_LATE = 0.05
"""Seconds. If requests leave the client later than this, the times include the client's delay."""

_DETAILS = 5


def write_report(result: AbResult, folder: Path, command: str) -> tuple[Path, Path]:
    """Write ``report.html`` and ``results.json`` into `folder`; returns both paths."""
    page, data = folder / "report.html", folder / "results.json"
    content = {**result.to_json(), "verdict": verdict(result), "command": command}
    write_private(data, json.dumps(content) + "\n")
    write_private(page, _page(result, command))
    return page, data


def notes(result: AbResult) -> Iterator[str]:
    """What a reader must know about the figures."""
    if result.on_cpu:
        yield _CPU_NOTE
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
                    f"{w.name}, {name}: the client itself sent 5 % of the requests more than "
                    f"{milliseconds(figures.late_p95)} late. Use a faster machine or a lower rate."
                )
            too_long = figures.lost.get("too long", 0)
            if too_long:
                yield (
                    f"{w.name}, {name}: {too_long:,} of {figures.requests:,} requests do not fit "
                    "the server's context and were not answered."
                )
        if w.agreement.not_compared:
            yield (
                f"{w.name}: {w.agreement.not_compared} answers continue a different answer and "
                "were not compared."
            )


def difference_lines(result: AbResult) -> Iterator[str]:
    """One line for each answer that differs, if the servers gave log-probabilities."""
    for w in result.workloads:
        for d in w.agreement.differences:
            if d.tokens is not None:
                told = ", ".join(
                    f"{name} says {_told(*token)}"
                    for name, token in zip(result.names, d.tokens, strict=True)
                )
                margin = MISSING if d.margin is None else f"{d.margin:.2g}"
                yield f"{w.name}, {d.name}: after {d.position} tokens {told}; margin {margin}"


def counted_side(result: AbResult) -> int | None:
    """The side whose KV reads are worth a table: the last one with tree attention."""
    for side in (1, 0):
        if any(c.steps_tree for w in result.workloads if (c := w.counters[side])):
            return side
    return None


def acceptance(result: AbResult) -> str:
    """Tokens of a verification on both sides; empty if no server speculates."""
    lengths = [side.acceptance_length for side in result.sides]
    if not any(lengths):
        return ""
    told = (MISSING if length is None else f"{length:.2f}" for length in lengths)
    return ", ".join(
        f"{side.name} {length}" for side, length in zip(result.sides, told, strict=True)
    )


def _told(token: str, logprob: float | None) -> str:
    return repr(token) if logprob is None else f"{token!r} ({logprob:.3f})"


def _page(result: AbResult, command: str) -> str:
    side = counted_side(result)
    commands = [command, *(f"# {s.name}\n{s.command}" for s in result.sides if s.command)]
    first, second = map(escape, result.names)
    said = "".join(f"<p>{escape(note)}</p>" for note in notes(result))
    models = dict.fromkeys(side.offers.model for side in result.sides)
    page = Template(_part("report.html"))
    return page.substitute(
        style=_part("report_style.html"),
        first=first,
        second=second,
        model=escape(" · ".join(models)),
        date=escape(str(result.provenance.get("date", ""))),
        verdict=escape(verdict(result)),
        cards="".join(_cards(result, side)),
        notes=f"<div class='note'>{said}</div>" if said else "",
        figures=table_rows(row for w in result.workloads for row in _figures(result, w)),
        changes=table_rows(_change(w) for w in result.workloads),
        plots=_plots(result, side),
        agreement=table_rows(_agreement(w) for w in result.workloads),
        close=f"{max((w.agreement.close for w in result.workloads), default=CLOSE):g}",
        margins=str(MARGINS),
        differences="".join(f"<p>{escape(line)}</p>" for line in difference_lines(result)),
        statuses="".join(f"<th>{status}</th>" for status in STATUSES),
        outcomes=table_rows(row for w in result.workloads for row in _outcomes(result, w)),
        details=_details(result),
        steps=table_rows(row for w in result.workloads for row in _steps(result, w)),
        workloads=table_rows(
            [w.name, f"{w.description}; arrivals: {w.arrivals}"] for w in result.workloads
        ),
        servers=table_rows(_servers(result)),
        command=escape("\n\n".join(commands)),
    )


def _part(name: str) -> str:
    folder = resources.files("deft_backend.tools.ab")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _cards(result: AbResult, side: int | None) -> Iterator[str]:
    compared = sum(w.agreement.compared for w in result.workloads)
    equal = sum(w.agreement.equal for w in result.workloads)
    if compared:
        kind = "good" if equal == compared else "bad" if result.exact else ""
        yield _card(kind, f"{equal:,} of {compared:,}", "answers have the same tokens")
    if side is None:
        return
    reads = [(w.kv_read(side), w.name) for w in result.workloads]
    saved = [(r.saved, name) for r, name in reads if r is not None and r.saved is not None]
    if saved:
        most, name = max(saved)
        yield _card("good", percent(most), f"less KV read per decode step ({name}, the most)")
    counted = [c for w in result.workloads if (c := w.counters[side])]
    tree, every = sum(c.steps_tree for c in counted), sum(c.decode_steps for c in counted)
    yield _card("", f"{tree:,} of {every:,}", "decode steps through tree attention")


def _card(kind: str, figure: str, text: str) -> str:
    return f"<div class='card {kind}'><b>{figure}</b>{escape(text)}</div>"


def _plots(result: AbResult, side: int | None) -> str:
    try:
        drawn = (
            [("KV cache read per decode step", kv_plot(result, side))] if side is not None else []
        )
        drawn += [
            (f"{w.name}: {w.arrivals}", time_plots(w, result.names)) for w in result.workloads
        ]
    except ImportError:
        return "<p>No plots, because matplotlib is not installed here.</p>"
    return "".join(
        f"<figure><img src='{address}' alt='{escape(text)}'><figcaption>{escape(text)}</figcaption>"
        "</figure><br>"
        for text, address in drawn
    )


def _figures(result: AbResult, w: ComparedWorkload) -> Iterator[list[str]]:
    for side, figures in enumerate(w.figures):
        read = w.kv_read(side)
        yield [
            "" if side else w.name,
            result.names[side],
            f"{figures.answered:,} of {figures.requests:,}",
            milliseconds(figures.ttft),
            milliseconds(figures.ttft_p95),
            milliseconds(figures.tpot),
            milliseconds(figures.tpot_p95),
            MISSING if figures.tokens_a_second is None else f"{figures.tokens_a_second:,.1f}",
            megabytes(read.query_by_query if read else None),
            megabytes(read.read if read else None),
            percent(read.saved if read else None),
        ]


def _change(w: ComparedWorkload) -> list[str]:
    change = paired_change(w)
    if change is None:
        return [w.name, "too few answers", MISSING]
    middle, low, high = (f"{100 * value:+.1f} %" for value in change)
    return [w.name, middle, f"{low} to {high}"]


def _agreement(w: ComparedWorkload) -> list[str]:
    a = w.agreement
    checked = [d for d in a.differences if d.margin is not None]
    numbers = (
        a.compared, a.equal, len(a.differences), len(checked) - a.unexplained, a.unexplained,
        len(a.differences) - len(checked), a.not_compared, a.tokens,
    )  # fmt: skip
    gap = MISSING if a.largest_gap is None else f"{a.largest_gap:.2g}"
    return [w.name, *(f"{number:,}" for number in numbers), gap]


def _outcomes(result: AbResult, w: ComparedWorkload) -> Iterator[list[str]]:
    for side, figures in enumerate(w.figures):
        counts = {ANSWERED: figures.answered, **figures.lost}
        name = result.names[side]
        yield ["" if side else w.name, name, *(f"{counts.get(s, 0):,}" for s in STATUSES)]


def _details(result: AbResult) -> str:
    """The first few requests that were not answered, in the servers' words."""
    rows = [
        [w.name, name, o.name, o.status, o.detail]
        for w in result.workloads
        for name, run in zip(result.names, w.runs, strict=True)
        for o in [o for o in run.outcomes if o.status != ANSWERED][:_DETAILS]
    ]
    if not rows:
        return ""
    return (
        f"<p>The first ones without an answer:</p><table><tbody>{table_rows(rows)}</tbody></table>"
    )


def _steps(result: AbResult, w: ComparedWorkload) -> Iterator[list[str]]:
    for side, counters in enumerate(w.counters):
        head = ["" if side else w.name, result.names[side]]
        if counters is None:
            yield [*head, *[MISSING] * 3]
            continue
        reasons = "; ".join(f"{reason}: {n:,}" for reason, n in counters.steps_host.items())
        yield [*head, f"{counters.decode_steps:,}", f"{counters.steps_tree:,}", reasons or "0"]


def _servers(result: AbResult) -> Iterator[list[str]]:
    for side in result.sides:
        offers = side.offers
        context = "unknown" if offers.context is None else f"{offers.context:,} tokens"
        words = [f"{side.url}: {offers.model}, context {context}"]
        words += [f"attention backend {side.backend}"] if side.backend else []
        words += [f"policy {side.policy}"] if side.policy and side.backend != side.policy else []
        words += [f"on {side.device}"] if side.device else []
        yield [side.name, ", ".join(words)]
    if acceptance(result):
        yield ["tokens a verification", acceptance(result)]
    facts = {key: value for key, value in result.provenance.items() if key != "date" and value}
    versions = facts.pop("versions", {})
    yield from ([name, str(value)] for name, value in facts.items())
    if isinstance(versions, dict):
        yield from ([name, str(version)] for name, version in versions.items())


def table_rows(rows: Iterable[Sequence[str]]) -> str:
    """The rows of a table; every cell is escaped."""
    return "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )

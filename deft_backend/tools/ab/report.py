"""The report of a comparison: a self-contained page, the JSON behind it, and one sentence: whether
to switch, and why."""

import base64
import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from deft_backend.files.private_files import write_private
from deft_backend.tools.ab.result import (
    FEW,
    AbResult,
    ComparedWorkload,
    log_ratios,
    milliseconds,
    paired_change,
)
from deft_backend.tools.ab.tables import Table, further_tables, main_tables
from deft_backend.tools.harness.answers import CUT, SKIPPED, TOO_LONG

_CPU_NOTE = (
    "Times on this machine mean nothing: there is no GPU, and the kernels run in Triton's "
    "interpreter. The KV figures are exact: the plugin counts the bytes that decode attention "
    "reads, and the same plan reads the same bytes on a GPU. (The policy auto plans for its "
    "device, so a GPU may treat very small batches otherwise.)"
)

_LATE = 0.05
"""Seconds. If requests leave the client later than this, the times include the client's delay."""

LEAST = 0.05  # A smaller change of the time per token is no reason to switch

_FIRST_TOKEN_WORSE = 0.15

_COLOURS = ("#9aa5b1", "#1f6feb")  # of the two servers in a plot


def write_report(result: AbResult, folder: Path, command: str) -> tuple[Path, Path]:
    page, data = folder / "report.html", folder / "results.json"
    content = {
        **result.to_json(),
        "verdict": verdict(result),
        "command": command,
        "tpot_change": {w.name: paired_change(w) for w in result.workloads},
    }
    write_private(data, json.dumps(content) + "\n")
    write_private(page, _page(result, command))
    return page, data


def notes(result: AbResult) -> Iterator[str]:
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
                    f"{milliseconds(1e3 * figures.late_p95)} late. Use a faster machine or a "
                    "lower rate."
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


def _page(result: AbResult, command: str) -> str:
    commands = [command, *(f"# {s.name}\n{s.command}" for s in result.sides if s.command)]
    said = "".join(f"<p>{escape(note)}</p>" for note in notes(result))
    template = resources.files("deft_backend.tools.ab").joinpath("report.html")
    return Template(template.read_text(encoding="utf-8")).substitute(
        names=escape(" and ".join(result.names)),
        models=escape(" · ".join(dict.fromkeys(side.offers.model for side in result.sides))),
        date=escape(str(result.provenance.get("date", ""))),
        verdict=escape(verdict(result)),
        notes=f"<div class='note'>{said}</div>" if said else "",
        main="".join(map(_table, main_tables(result))),
        plots="".join(_plot(w, result.names) for w in result.workloads),
        further="".join(map(_table, further_tables(result))),
        command=escape("\n\n".join(commands)),
    )


def _table(table: Table) -> str:
    head, *rows = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in [("th", table.columns), *(("td", row) for row in table.rows)]
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f"<h2>{escape(table.title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        f"</table><p class='dim'>{escape(table.note)}</p>"
    )


def _plot(w: ComparedWorkload, names: tuple[str, str]) -> str:
    text = escape(f"{w.name}: {w.arrivals}")
    address = _time_plot(w, names)
    return f"<figure><img src='{address}' alt='{text}'><figcaption>{text}</figcaption></figure>"


def _time_plot(w: ComparedWorkload, names: tuple[str, str]) -> str:
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
            figure.subplots(1, 2),
            (ttft, tpot),
            ("time to first token", "time per output token"),
            strict=True,
        ):
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


def verdict(result: AbResult) -> str:
    old, new = result.names
    if len(result.sides) < 2 or not result.workloads:
        return f"No decision: the run ended before {new} was measured."
    for side in result.sides:
        died = next((run.died for run in side.runs if run.died), "")
        if died:
            say = "Do not switch" if side.name == new else "No decision"
            return f"{say}: {side.name} died during the run ({died[:120]})."
    lost = [_lost(result, side) for side in (0, 1)]
    every = sum(f.requests for w in result.workloads for f in w.figures[1:])
    if lost[1] > lost[0]:
        return f"Do not switch: {new} lost {lost[1]:,} of {every:,} requests, {old} {lost[0]:,}."
    unexplained = sum(w.agreement.unexplained for w in result.workloads)
    compared = sum(w.agreement.compared for w in result.workloads)
    if unexplained:
        return (
            f"Do not switch before you know why: {unexplained:,} of {compared:,} answers differ "
            "where a server was sure of its token."
        )
    tokens = _tokens(result, compared)
    if result.interrupted:
        return f"No decision: the run was interrupted; so far, {tokens}."
    if result.on_cpu:
        read = _reads(result)
        return f"No decision about times, which mean nothing on a CPU; {tokens}{read}."
    return _times(result, tokens)


def _times(result: AbResult, tokens: str) -> str:
    new = result.names[1]
    changes = {w.name: paired_change(w) for w in result.workloads}
    known = {name: change for name, change in changes.items() if change is not None}
    if not known:
        return f"No decision: fewer than {FEW} requests were answered by both; {tokens}."
    better = [name for name, (_, _, high) in known.items() if high < -LEAST]
    worse = [name for name, (_, low, _) in known.items() if low > LEAST]
    slow_start = [w for w in result.workloads if _first_token(w) > _FIRST_TOKEN_WORSE]
    figures = "; ".join(_figure(w, known) for w in result.workloads if w.name in known)
    if better and worse:
        return (
            f"Switch only for {_and(better)}: a token of {_and(worse)} takes longer with {new} "
            f"({figures}); {tokens}."
        )
    if worse:
        return f"Do not switch: a token takes longer with {new} ({figures}); {tokens}."
    if better and slow_start:
        names = _and([w.name for w in slow_start])
        return f"Switch to {new} if the first token may come later ({names}): {figures}; {tokens}."
    if better:
        rest = [name for name in known if name not in better]
        same = f" ({_and(rest)}: no clear difference)" if rest else ""
        return f"Switch to {new}: {figures}{same}; {tokens}."
    return f"No reason to switch: {figures}, which is no clear difference; {tokens}."


def _figure(w: ComparedWorkload, known: dict[str, tuple[float, float, float]]) -> str:
    change = known[w.name][0]
    first, second = (f.tpot and f.tpot.p50 for f in w.figures)
    return (
        f"{w.name}: a token takes {abs(change):.0%} {'less' if change <= 0 else 'more'} time "
        f"({milliseconds(first)} → {milliseconds(second)})"
    )


def _first_token(w: ComparedWorkload) -> float:
    ratios = log_ratios(w, lambda answer: answer.ttft)
    return math.exp(statistics.median(ratios)) - 1 if len(ratios) >= FEW else 0.0


def _lost(result: AbResult, side: int) -> int:
    fair = (TOO_LONG, CUT, SKIPPED)
    return sum(
        count
        for w in result.workloads
        for status, count in w.figures[side].lost.items()
        if status not in fair
    )


def _tokens(result: AbResult, compared: int) -> str:
    if not compared:
        return "no answers could be compared"
    equal = sum(w.agreement.equal for w in result.workloads)
    if equal == compared:
        return f"all {compared:,} compared answers are the same"
    differences = [d for w in result.workloads for d in w.agreement.differences]
    asked = sum(d.margin is not None for d in differences)
    why = f"{asked:,} of them checked: near ties" if asked else "the server does not tell why"
    return f"{len(differences):,} of {compared:,} answers differ ({why})"


def _reads(result: AbResult) -> str:
    saved = [
        (read.saved, w.name)
        for w in result.workloads
        if (read := w.kv_read(1)) is not None and read.saved
    ]
    if not saved:
        return ""
    best, name = max(saved)
    return f", and {result.names[1]} reads up to {best:.0%} less KV a step ({name})"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

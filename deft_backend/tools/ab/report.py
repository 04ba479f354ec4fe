"""The report of a comparison: a self-contained page, the JSON behind it, and one sentence: whether
to switch, and why."""

import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from deft_backend.files.private_files import write_private
from deft_backend.tools.ab.result import (
    FEW,
    AbResult,
    ComparedWorkload,
    log_ratios,
    milliseconds,
    paired_change,
)
from deft_backend.tools.ab.tables import differences, further_tables, main_tables, print_tables
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

DIFFERENCES_SHOWN = 12  # in the terminal; the page has all of them

_PAGE_WIDTH = 160  # characters


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
    for at, server in enumerate(result.servers):
        if died := _died(result, at):
            yield f"{server.name}: {died}. No further requests were sent."
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


def print_result(result: AbResult, console: Console) -> None:
    print_tables(main_tables(result), console)
    for note in notes(result):
        _line(f"• {note}", console, "yellow")
    different = differences(result)
    for workload, request, difference in different[:DIFFERENCES_SHOWN]:
        _line(f"{workload}, {request}: {difference}", console)
    if different[DIFFERENCES_SHOWN:]:
        more = len(different) - DIFFERENCES_SHOWN
        _line(f"{more:,} more differences are in the report", console)
    if result.exact and any(w.agreement.compared for w in result.workloads):
        answers = sum(w.agreement.equal for w in result.workloads)
        same = f"[green]✓ all {answers} answers have the same tokens[/green]"
        console.print(same if result.same else "[bold red]✗ tokens differ[/bold red]")
    _line(verdict(result), console, "bold")


def _page(result: AbResult, command: str) -> str:
    console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH)
    models = " · ".join(dict.fromkeys(server.offers.model for server in result.servers))
    names, date = " and ".join(result.names), result.provenance.get("date", "")
    _line(f"deft ab · {names} · {models} · {date}", console, "bold")
    _line(verdict(result), console, "bold")
    for note in notes(result):
        _line(f"• {note}", console)
    print_tables([*main_tables(result), *further_tables(result)], console, with_notes=True)
    for line in (command, *(f"{s.name}: {s.command}" for s in result.servers if s.command)):
        _line(line, console)
    return console.export_html()


def _line(text: str, console: Console, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False)


def verdict(result: AbResult) -> str:
    old, new = result.names
    if len(result.servers) < 2 or not result.workloads:
        return f"No decision: the run ended before {new} was measured."
    for at, name in enumerate(result.names):
        if died := _died(result, at):
            say = "Do not switch" if name == new else "No decision"
            return f"{say}: {name} died during the run ({died[:120]})."
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


def _died(result: AbResult, side: int) -> str:
    return next(filter(None, (w.sides[side].run.died for w in result.workloads)), "")


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
    first, second = (f.tpot_ms and f.tpot_ms.p50 for f in w.figures)
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
        if (read := w.sides[1].kv_read) is not None and read.saved
    ]
    if not saved:
        return ""
    best, name = max(saved)
    return f", and {result.names[1]} reads up to {best:.0%} less KV a step ({name})"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

"""The tables of a comparison: the terminal shows the main ones, the report all."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from deft_backend.telemetry.decode_log import reasons
from deft_backend.tools.ab.agreement import CLOSE, MARGINS
from deft_backend.tools.ab.result import (
    MISSING,
    AbResult,
    ComparedWorkload,
    megabytes,
    paired_change,
    percent,
)
from deft_backend.tools.harness.answers import ANSWERED

_DETAILS = 5  # requests without an answer that the report shows for each server and workload


_AGREED = (
    *("workload", "answers compared", "the same", "near ties", "different where a server was sure"),
    *("different, not checked", "not comparable", "largest log-probability gap"),
)


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


def print_tables(tables: Sequence[Table], console: Console, *, with_notes: bool = False) -> None:
    for title, (first, *figures), rows, note in tables:
        table = rich.table.Table(
            title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
        )
        table.add_column(first, no_wrap=True)
        numbers = len(figures) > 2
        for name in figures:  # no figure is cut
            table.add_column(name, justify="right" if numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        if with_notes and note:
            console.print(note, style="dim", markup=False, highlight=False)


def main_tables(result: AbResult) -> list[Table]:
    """KV reads and times; each row fits one line of a terminal of 80 columns."""
    side = counted_side(result)
    tables = (_times(result), _load(result), _goodput(result))
    found = [table for table in tables if table.rows]
    return found if side is None else [_reads(result, side), *found]


def further_tables(result: AbResult) -> list[Table]:
    close = max((w.agreement.close for w in result.workloads), default=CLOSE)
    tables = (
        Table(
            "Do the tokens agree?",
            _AGREED,
            [_agreement(w) for w in result.workloads],
            f"Near tie: the two likeliest tokens were less than {close:g} apart (log-probability), "
            "so the rounding of two correct kernels can decide. The first "
            f"{MARGINS} differences of a workload are checked. Not comparable: the prompt "
            "continues a different answer.",
        ),
        Table("Answers that differ", ("workload", "request", "difference"), differences(result)),
        Table(
            "Decode steps on the host's kernel",
            ("workload", "server", "steps, by reason"),
            list(_host_steps(result)),
        ),
        Table(
            "Requests without an answer",
            ("workload", "server", "request", "", "detail"),
            list(_lost(result)),
            f"The first {_DETAILS} of each server.",
        ),
        Table(
            "Workloads",
            ("workload", "requests", "arrivals"),
            [[w.name, w.description, w.arrivals] for w in result.workloads],
        ),
        Table("Servers and environment", ("", ""), list(_servers(result))),
    )
    return [table for table in tables if table.rows]


def differences(result: AbResult) -> list[list[str]]:
    rows = []
    for w in result.workloads:
        for d in w.agreement.differences:
            if d.tokens is not None:
                told = ", ".join(
                    f"{name} says {token!r}" + ("" if logprob is None else f" ({logprob:.3f})")
                    for name, (token, logprob) in zip(result.names, d.tokens, strict=True)
                )
                margin = MISSING if d.margin is None else f"{d.margin:.2g}"
                rows.append([w.name, d.name, f"after {d.position} tokens {told}; margin {margin}"])
    return rows


def counted_side(result: AbResult) -> int | None:
    for side in (1, 0):
        if any(c.steps_tree for w in result.workloads if (c := w.sides[side].counters)):
            return side
    return None


def _reads(result: AbResult, side: int) -> Table:
    """KV reads of one side: the steps of two servers hold different requests."""
    shown = result.names[side]
    columns = ("workload", "query by query", shown, "saved", "tree steps", "same answers")
    rows = []
    for w in result.workloads:
        read, counted = w.sides[side].kv_read, w.sides[side].counters
        rows.append(
            [
                w.name,
                megabytes(read.query_by_query if read else None),
                megabytes(read.read if read else None),
                percent(read.saved if read else None),
                f"{counted.steps_tree} of {counted.decode_steps}" if counted else MISSING,
                f"{w.agreement.equal} of {w.agreement.compared}",
            ]
        )
    note = (
        "KV read: bytes of KV cache that a decode step reads, over all layers, on average, from "
        "the plugin's counters. query by query: what the same steps would read if every query read "
        "its whole context."
    )
    return Table("KV read per decode step, and agreement", columns, rows, note)


def _times(result: AbResult) -> Table:
    title = "Times (not meaningful without a GPU)" if result.on_cpu else "Times"
    rows = []
    for w in result.workloads:
        paired = paired_change(w)
        part = 0.0 if paired is None else 100 * paired[0]
        change = "" if paired is None else f"{part:+,.0f} %" if part >= 100 else f"{part:+.1f} %"
        for side, f in enumerate(w.figures):
            ttft, tpot = f.ttft_ms, f.tpot_ms
            times = (ttft and ttft.p50, tpot and tpot.p50, tpot and tpot.p95)
            rows.append(
                [
                    "" if side else w.name,
                    result.names[side],
                    f"{f.answered}/{f.requests}",
                    *map(_milliseconds, times),
                    change if side else "",
                    MISSING if f.tokens_a_second is None else f"{f.tokens_a_second:,.0f}",
                ]
            )
    note = (
        "TTFT, TPOT: time to the first token and per later token, medians over answers. 95 %: of "
        "TPOT. change: the median, over requests that both servers answered, of how TPOT changes."
    )
    columns = ("workload", "server", "answered", "TTFT ms", "TPOT ms", "95 %", "change", "tok/s")
    return Table(title, columns, rows, note)


def _load(result: AbResult) -> Table:
    """Of workloads whose requests arrive one after the other."""
    rows, none = [], (None,) * 4
    for w in result.workloads:
        if any(outcome.at for side in w.sides for outcome in side.run.outcomes):
            for side, f in enumerate(w.figures):
                times = (*(f.ttft_ms or none)[2:], *(f.gap_ms or none))
                figures = map(_milliseconds, times)
                rows.append(["" if side else w.name, result.names[side], *figures])
    note = "TTFT: time to the first token. gap: time between two pieces of a stream."
    columns = ("workload", "server", "TTFT 95 %", "99 %", "gap mean", "50 %", "95 %", "99 %")
    return Table("Under load, ms", columns, rows, note)


def _goodput(result: AbResult) -> Table:
    rows, bound = [], 0.0
    for w in result.workloads:
        found = [side.goodput for side in w.sides if side.goodput is not None]
        if found:
            bound, old = found[0].bound_ms, found[0].rate
            ratio = f"{found[1].rate / old:.2f}" if len(found) == 2 and old else MISSING
            rates = (MISSING if side.goodput is None else str(side.goodput) for side in w.sides)
            rows.append([w.name, *rates, ratio])
    first, second = result.names
    columns = ("workload", first, second, f"{second} over {first}")
    note = "The highest rate of requests at which the 99th percentile of the gaps holds the bound."
    return Table(f"Goodput: 99 % of gaps below {bound:g} ms", columns, rows, note)


def _milliseconds(ms: float | None) -> str:
    if ms is None:
        return MISSING
    return f"{ms:,.1f}" if ms < 1000 else f"{ms:,.0f}"


def _agreement(w: ComparedWorkload) -> list[str]:
    a = w.agreement
    checked = sum(d.margin is not None for d in a.differences)
    near, unchecked = checked - a.unexplained, len(a.differences) - checked
    numbers = (a.compared, a.equal, near, a.unexplained, unchecked, a.not_compared)
    gap = MISSING if a.largest_gap is None else f"{a.largest_gap:.2g}"
    return [w.name, *(f"{number:,}" for number in numbers), gap]


def _host_steps(result: AbResult) -> Iterator[list[str]]:
    for w in result.workloads:
        for name, side in zip(result.names, w.sides, strict=True):
            counters = side.counters
            if counters and counters.steps_tree and counters.steps_host:
                yield [w.name, name, reasons(counters.steps_host)]


def _lost(result: AbResult) -> Iterator[list[str]]:
    for w in result.workloads:
        for name, side in zip(result.names, w.sides, strict=True):
            lost = [o for o in side.run.outcomes if o.status != ANSWERED]
            yield from ([w.name, name, o.name, o.status, o.detail] for o in lost[:_DETAILS])


def _servers(result: AbResult) -> Iterator[list[str]]:
    for server in result.servers:
        offers = server.offers
        context = "unknown" if offers.context is None else f"{offers.context:,} tokens"
        words = [f"{server.url}: {offers.model}, context {context}"]
        words += [f"attention backend {server.backend}"] if server.backend else []
        words += [f"policy {server.policy}"] if server.policy not in ("", server.backend) else []
        words += [f"on {server.device}"] if server.device else []
        yield [server.name, ", ".join(words)]
    facts = dict(result.provenance)
    versions = facts.pop("versions", None)
    facts |= versions if isinstance(versions, dict) else {}
    yield from ([name, str(value)] for name, value in facts.items() if value)

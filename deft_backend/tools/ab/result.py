"""The result of a comparison, as the report and the terminal show it."""

from __future__ import annotations

import math
import statistics
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.decode_log import size
from deft_backend.tools.ab.agreement import Agreement
from deft_backend.tools.harness.answers import ANSWERED, TOO_LONG, Answer
from deft_backend.tools.harness.client import Offers
from deft_backend.tools.harness.open_loop import Goodput, Seen, Spread
from deft_backend.tools.harness.workload import Outcome, Replayed, Workload


@dataclass(frozen=True)
class SideRun:
    name: str
    url: str
    offers: Offers
    runs: tuple[Replayed, ...]
    counters: tuple[Counters | None, ...]
    agreements: tuple[Agreement, ...]
    goodputs: tuple[Goodput, ...] = ()  # by workload, if asked for
    # By its state file; empty without one.
    device: str = ""
    backend: str = ""
    policy: str = ""
    eight_bits: bool = False  # whether its KV cache has 8 bits, by its state file
    command: str = ""  # its command, if this process started it


class KvRead(NamedTuple):
    query_by_query: float  # if every query read its whole context, as in the host's kernel
    read: float
    saved: float | None  # share of the reads, 0 to 1; see :attr:`Counters.saved`


@dataclass(frozen=True)
class Figures:
    """One side of a workload; times are None without an answer."""

    answered: int
    lost: Mapping[str, int]
    ttft: Spread | None  # time to the first token
    tpot: Spread | None  # time per later token, of each answer
    gap: Spread | None  # time between two pieces of a stream
    tokens_a_second: float | None
    late_p95: float | None  # seconds by which the client sent requests late

    @property
    def requests(self) -> int:
        return self.answered + sum(self.lost.values())

    @classmethod
    def of(cls, run: Replayed) -> Figures:
        seen = Seen.of(run)
        late = sorted(o.sent - o.at for o in run.outcomes if o.answer is not None and o.at)
        return cls(
            len(seen.firsts),
            dict(Tally(o.status for o in run.outcomes if o.status != ANSWERED)),
            Spread.of(seen.firsts),
            Spread.of(seen.per_token),
            Spread.of(seen.gaps),
            tokens_a_second=seen.tokens / run.seconds if run.seconds else None,
            late_p95=late[round(0.95 * (len(late) - 1))] if late else None,
        )


@dataclass(frozen=True)
class ComparedWorkload:
    name: str
    description: str
    arrivals: str
    runs: tuple[Replayed, Replayed]
    counters: tuple[Counters | None, Counters | None]
    agreement: Agreement
    goodputs: tuple[Goodput | None, Goodput | None] = (None, None)

    @property
    def figures(self) -> tuple[Figures, Figures]:
        return Figures.of(self.runs[0]), Figures.of(self.runs[1])

    def kv_read(self, side: int) -> KvRead | None:
        """KV reads of a decode step of one side; None if its counters are unknown."""
        counted = self.counters[side]
        if counted is None or not counted.decode_steps:
            return None
        steps = counted.decode_steps
        read, guided = counted.kv_bytes_read, counted.kv_bytes_query_guided
        return KvRead(guided / steps, read / steps, counted.saved)


_SHOWN = ("name", "url", "device", "backend", "policy", "command")


@dataclass(frozen=True)
class AbResult:
    names: tuple[str, str]
    sides: tuple[SideRun, ...]
    workloads: tuple[ComparedWorkload, ...]
    interrupted: bool
    provenance: Mapping[str, object] = field(default_factory=dict)
    exact: bool = False

    @property
    def on_cpu(self) -> bool:
        return any(side.device.startswith("cpu") for side in self.sides)

    @property
    def same(self) -> bool:
        return not any(w.agreement.differences for w in self.workloads)

    @property
    def faults(self) -> bool:
        lost = any(
            status != TOO_LONG for w in self.workloads for f in w.figures for status in f.lost
        )
        died = any(run.died for side in self.sides for run in side.runs)
        wrong = any(w.agreement.unexplained for w in self.workloads)
        return lost or died or wrong or (self.exact and not self.same)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 6,
            "same": self.same,
            "exact": self.exact,
            "interrupted": self.interrupted,
            "sides": [
                {**{name: getattr(s, name) for name in _SHOWN}, **asdict(s.offers)}
                for s in self.sides
            ],
            "workloads": [_workload_json(w) for w in self.workloads],
            "provenance": dict(self.provenance),
        }


def compare_sides(
    names: tuple[str, str],
    sides: Sequence[SideRun],
    workloads: Sequence[Workload],
    *,
    interrupted: bool,
    provenance: Mapping[str, object],
    exact: bool,
) -> AbResult:
    empty = Replayed((), 0.0, interrupted=interrupted)

    def of_both(name: str, at: int, missing: Any) -> Any:
        """A workload's entry of each side; `missing` where a side has none."""
        columns = [*(getattr(side, name) for side in sides), (), ()][:2]
        return tuple(column[at] if at < len(column) else missing for column in columns)

    compared = []
    for at, workload in enumerate(workloads):
        runs = of_both("runs", at, empty)
        if any(run.outcomes for run in runs):
            texts = (workload.name, workload.description, workload.arrivals)
            same = of_both("agreements", at, Agreement(0, 0))[1]
            counted, rates = of_both("counters", at, None), of_both("goodputs", at, None)
            compared.append(ComparedWorkload(*texts, runs, counted, same, rates))
    return AbResult(names, tuple(sides), tuple(compared), interrupted, provenance, exact)


def _workload_json(w: ComparedWorkload) -> dict[str, Any]:
    reads = [w.kv_read(side) for side in (0, 1)]
    return {
        "workload": w.name,
        "description": w.description,
        "arrivals": w.arrivals,
        "figures": [_figures_json(f) for f in w.figures],
        "goodput": [g and asdict(g) for g in w.goodputs],
        "counters": [None if c is None else c.as_json() for c in w.counters],
        "kv_bytes_a_step": [r and r._asdict() for r in reads],
        "agreement": asdict(w.agreement),
        "died": [run.died for run in w.runs],
        "requests": [[_outcome_json(o) for o in run.outcomes] for run in w.runs],
    }


def _figures_json(f: Figures) -> dict[str, Any]:
    spreads = {f"{name}_ms": getattr(f, name) for name in ("ttft", "tpot", "gap")}
    return {
        "answered": f.answered,
        "lost": f.lost,
        **{name: spread and spread._asdict() for name, spread in spreads.items()},
        "tokens_a_second": f.tokens_a_second,
        "late_p95": f.late_p95,
    }


def _outcome_json(o: Outcome) -> dict[str, Any]:
    arrivals = [] if o.answer is None else [round(at, 5) for at in o.answer.arrivals]
    return {
        "name": o.name,
        "due": round(o.at, 4),
        "sent": round(o.sent, 4),
        "status": o.status,
        "detail": o.detail,
        "prompt_tokens": o.prompt_tokens,
        "arrivals": arrivals,
    }


FEW = 8  # with fewer pairs of answers, the sentence says nothing about times


def paired_change(w: ComparedWorkload) -> tuple[float, float, float] | None:
    """Change of the time per token, with a 95 % interval, over requests that both answered."""
    ratios = log_ratios(w, lambda answer: answer.tpot)
    if len(ratios) < FEW:
        return None
    ordered = sorted(ratios)
    # The number of ratios below the true median is binomial. So order statistics bound the median.
    reach = 0.98 * math.sqrt(len(ordered))
    low = ordered[max(0, math.floor(len(ordered) / 2 - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach) - 1)]
    middle = statistics.median(ratios)
    return math.exp(middle) - 1, math.exp(low) - 1, math.exp(high) - 1


def log_ratios(w: ComparedWorkload, time_of: Callable[[Answer], float | None]) -> list[float]:
    first, second = (
        {o.name: o.answer for o in run.outcomes if o.answer is not None} for run in w.runs
    )
    pairs = [(time_of(first[key]), time_of(second[key])) for key in first if key in second]
    return [math.log(after / before) for before, after in pairs if before and after]


MISSING = "–"


def megabytes(value: float | None) -> str:
    return MISSING if value is None else size(value, digits=2)


def milliseconds(ms: float | None) -> str:
    if ms is None:
        return MISSING
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.2f} ms"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value * 100 + 0.0:.1f} %".replace("-0.0 %", "0.0 %")

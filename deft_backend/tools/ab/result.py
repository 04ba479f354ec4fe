"""The result of a comparison, as the report and the terminal show it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.decode_log import size
from deft_backend.tools.ab.agreement import Agreement
from deft_backend.tools.harness.answers import TOO_LONG, Answer
from deft_backend.tools.harness.client import Offers
from deft_backend.tools.harness.open_loop import Figures, Goodput, Spread
from deft_backend.tools.harness.workload import Outcome, Replayed


class KvRead(NamedTuple):
    query_by_query: float  # if every query read its whole context, as in the host's kernel
    read: float
    saved: float | None  # share of the reads, 0 to 1; see :attr:`Counters.saved`


@dataclass(frozen=True)
class Measured:
    """A workload on one server."""

    run: Replayed
    counters: Counters | None = None  # of its steps, if the plugin counts them
    goodput: Goodput | None = None  # if asked for
    agreement: Agreement | None = None  # with the answers of the first server

    @property
    def kv_read(self) -> KvRead | None:
        """KV reads of a decode step; None if the counters are unknown."""
        counted = self.counters
        if counted is None or not counted.decode_steps:
            return None
        steps = counted.decode_steps
        read, guided = counted.kv_bytes_read, counted.kv_bytes_query_guided
        return KvRead(guided / steps, read / steps, counted.saved)


@dataclass(frozen=True)
class ComparedWorkload:
    name: str
    description: str
    arrivals: str
    sides: tuple[Measured, Measured]
    agreement: Agreement

    @property
    def figures(self) -> tuple[Figures, Figures]:
        return Figures.of(self.sides[0].run), Figures.of(self.sides[1].run)


@dataclass(frozen=True)
class Server:
    """A server of the comparison, by its own words and its state file."""

    name: str
    url: str
    offers: Offers
    # By its state file; empty without one.
    device: str = ""
    backend: str = ""
    policy: str = ""
    eight_bits: bool = False  # whether its KV cache has 8 bits, by its state file
    command: str = ""  # its command, if this process started it


_SHOWN = ("name", "url", "device", "backend", "policy", "command")


@dataclass(frozen=True)
class AbResult:
    names: tuple[str, str]
    servers: tuple[Server, ...]  # fewer than two if the run ended before
    workloads: tuple[ComparedWorkload, ...]
    interrupted: bool
    provenance: Mapping[str, object] = field(default_factory=dict)
    exact: bool = False

    @property
    def on_cpu(self) -> bool:
        return any(server.device.startswith("cpu") for server in self.servers)

    @property
    def same(self) -> bool:
        return not any(w.agreement.differences for w in self.workloads)

    @property
    def faults(self) -> bool:
        lost = any(
            status != TOO_LONG for w in self.workloads for f in w.figures for status in f.lost
        )
        died = any(side.run.died for w in self.workloads for side in w.sides)
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
                for s in self.servers
            ],
            "workloads": [_workload_json(w) for w in self.workloads],
            "provenance": dict(self.provenance),
        }


def _workload_json(w: ComparedWorkload) -> dict[str, Any]:
    return {
        "workload": w.name,
        "description": w.description,
        "arrivals": w.arrivals,
        "figures": [_figures_json(f) for f in w.figures],
        "goodput": [s.goodput and asdict(s.goodput) for s in w.sides],
        "counters": [s.counters and s.counters.as_json() for s in w.sides],
        "kv_bytes_a_step": [s.kv_read and s.kv_read._asdict() for s in w.sides],
        "agreement": asdict(w.agreement),
        "died": [s.run.died for s in w.sides],
        "requests": [[_outcome_json(o) for o in s.run.outcomes] for s in w.sides],
    }


def _figures_json(f: Figures) -> dict[str, Any]:
    return {
        name: value._asdict() if isinstance(value, Spread) else value
        for name, value in vars(f).items()
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
    first, second = (side.run.answers for side in w.sides)
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

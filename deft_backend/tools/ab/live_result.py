"""The result of a comparison over time, as the report and the terminal show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deft_backend.telemetry.counters import Counters
from deft_backend.tools.ab.comparison import KvRead
from deft_backend.tools.ab.live_agreement import LiveAgreement
from deft_backend.tools.ab.live_figures import Figures, figures
from deft_backend.tools.ab.live_run import SideRun
from deft_backend.tools.harness.live_request import TOO_LONG
from deft_backend.tools.harness.replay import Outcome, Replayed
from deft_backend.tools.harness.traffic import Traffic


@dataclass(frozen=True)
class LiveWorkload:
    """One workload on both sides."""

    workload: str
    description: str
    arrivals: str
    runs: tuple[Replayed, Replayed]
    counters: tuple[Counters | None, Counters | None]
    agreement: LiveAgreement

    @property
    def figures(self) -> tuple[Figures, Figures]:
        return figures(self.runs[0]), figures(self.runs[1])

    def kv_read(self, side: int) -> KvRead | None:
        """KV reads of a decode step of one side; None if its counters are unknown."""
        found = self.counters[side]
        if found is None or not found.decode_steps:
            return None
        steps = found.decode_steps
        return KvRead(found.kv_bytes_query_guided / steps, found.kv_bytes_read / steps)


@dataclass(frozen=True)
class LiveResult:
    """Everything that the report shows."""

    names: tuple[str, str]
    sides: tuple[SideRun, ...]
    workloads: tuple[LiveWorkload, ...]
    interrupted: bool
    provenance: Mapping[str, object] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether a server says that it runs on a CPU, where times mean nothing."""
        return any(side.device.startswith("cpu") for side in self.sides)

    @property
    def faults(self) -> bool:
        """Whether a server lost a request that it could take, or gave an answer that is wrong."""
        lost = any(
            status != TOO_LONG for w in self.workloads for f in w.figures for status in f.lost
        )
        died = any(run.died for side in self.sides for run in side.runs)
        return lost or died or any(w.agreement.unexplained for w in self.workloads)

    def to_json(self) -> dict[str, Any]:
        """Plain data: figures, and each request's times; no prompts and no answers."""
        return {
            "schema": 1,
            "interrupted": self.interrupted,
            "sides": [
                {"name": s.name, "url": s.url, "device": s.device, "backend": s.backend,
                 **asdict(s.offers)}
                for s in self.sides
            ],
            "workloads": [_workload_json(w) for w in self.workloads],
            "provenance": dict(self.provenance),
        }  # fmt: skip


def compare_sides(
    names: tuple[str, str], sides: Sequence[SideRun], traffics: Sequence[Traffic],
    interrupted: bool, provenance: Mapping[str, object],
) -> LiveResult:  # fmt: skip
    """The result of both runs; of an interrupted comparison, the part that ran."""
    empty = Replayed((), 0.0, interrupted=interrupted)
    workloads = []
    for at, traffic in enumerate(traffics):
        found = [side.runs[at] if at < len(side.runs) else empty for side in sides]
        counts = [side.counters[at] if at < len(side.counters) else None for side in sides]
        while len(found) < 2:
            found.append(empty)
            counts.append(None)
        if not any(run.outcomes for run in found):
            continue
        agreed = sides[1].agreements if len(sides) > 1 else ()
        workloads.append(
            LiveWorkload(
                traffic.workload, traffic.description, traffic.arrivals, (found[0], found[1]),
                (counts[0], counts[1]), agreed[at] if at < len(agreed) else LiveAgreement(0, 0),
            )
        )  # fmt: skip
    return LiveResult(names, tuple(sides), tuple(workloads), interrupted, provenance)


def _workload_json(w: LiveWorkload) -> dict[str, Any]:
    return {
        "workload": w.workload, "description": w.description, "arrivals": w.arrivals,
        "figures": [asdict(f) for f in w.figures],
        "counters": [None if c is None else c.as_json() for c in w.counters],
        "agreement": asdict(w.agreement),
        "died": [run.died for run in w.runs],
        "requests": [[_outcome_json(o) for o in run.outcomes] for run in w.runs],
    }  # fmt: skip


def _outcome_json(o: Outcome) -> dict[str, Any]:
    arrivals = [] if o.answer is None else [round(at, 5) for at in o.answer.arrivals]
    return {
        "name": o.name, "index": o.index, "due": round(o.at, 4), "sent": round(o.sent, 4),
        "status": o.status, "detail": o.detail, "prompt_tokens": o.prompt_tokens,
        "arrivals": arrivals,
    }  # fmt: skip

"""The comparison of two servers over time: the same traffic to one, then to the other."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from deft_backend.ab.comparison import KvRead
from deft_backend.ab.invented_text import passage
from deft_backend.harness.answers import Answer, first_difference
from deft_backend.harness.live_client import ANSWERED, TOO_LONG, LiveClient, Offers
from deft_backend.harness.live_counters import LiveCounters
from deft_backend.harness.replay import Outcome, Replayed, replay
from deft_backend.harness.traffic import Traffic
from deft_backend.telemetry.counters import Counters

MARGINS = 12
"""Different answers about which the servers are asked how close their likeliest tokens were."""

CLOSE = 0.15
"""A margin of log-probability below which the rounding of two correct 16-bit kernels can decide."""

_SAMPLE = passage(4000, "sample")


class Live(Protocol):
    """A server while traffic runs against it."""

    url: str

    def counters(self) -> LiveCounters:
        """Where its counters are."""
        ...


class Progress(Protocol):
    """Receives the progress of a run."""

    def replaying(self, side: str, traffic: Traffic) -> Callable[[int], None]:
        """Traffic begins; the caller passes numbers of new tokens to the returned function."""
        ...


@dataclass(frozen=True)
class Side:
    """One of the two servers.

    Attributes
    ----------
    name : str
        In the report.
    title : str
        A line for the terminal before its run; empty if its start prints one.
    open : callable
        A context manager around the server.
    """

    name: str
    title: str
    open: Callable[[], AbstractContextManager[Live]]


@dataclass(frozen=True)
class SideRun:
    """All traffic on one server."""

    name: str
    url: str
    offers: Offers
    runs: tuple[Replayed, ...]
    counters: tuple[Counters | None, ...]
    agreements: tuple[Agreement, ...]
    device: str
    backend: str


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers.

    Attributes
    ----------
    name : str
    position : int
        Tokens before it.
    margin : float, optional
        Log-probability of the likeliest token there, minus that of the next one: the larger margin
        of the servers that still run. None if none was asked or tells.
    """

    name: str
    position: int
    margin: float | None


@dataclass(frozen=True)
class Agreement:
    """Tokens of the requests that both servers answered."""

    compared: int
    equal: int
    differences: tuple[Difference, ...] = ()

    @property
    def unexplained(self) -> int:
        """Answers that differ where a server was sure of its token."""
        return sum(d.margin is not None and d.margin >= CLOSE for d in self.differences)


@dataclass(frozen=True)
class Figures:
    """Medians and tails of one side of a workload, in seconds; None without an answer."""

    answered: int
    lost: Mapping[str, int]
    ttft: float | None
    ttft_p95: float | None
    tpot: float | None
    tpot_p95: float | None
    tokens_a_second: float | None
    prompt_tokens: int
    late_p95: float | None

    @property
    def requests(self) -> int:
        return self.answered + sum(self.lost.values())


@dataclass(frozen=True)
class LiveWorkload:
    """One workload on both sides."""

    workload: str
    description: str
    arrivals: str
    runs: tuple[Replayed, Replayed]
    counters: tuple[Counters | None, Counters | None]
    agreement: Agreement

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


async def run_side(
    live: Live, name: str, traffics: Callable[[Offers], Sequence[Traffic]], model: str | None,
    first: SideRun | None, progress: Progress,
) -> tuple[SideRun, bool]:  # fmt: skip
    """Send all traffic to one server; the second value tells whether the run was interrupted.

    Parameters
    ----------
    live : Live
    name : str
    traffics : callable
        Makes the traffic for what the server offers.
    model : str, optional
    first : SideRun, optional
        The other server's run. This one then gets equal requests, and its answers are compared.
    progress : Progress

    Raises
    ------
    LiveError
        If the server does not answer at all.
    """
    source = live.counters()
    runs: list[Replayed] = []
    counted: list[Counters | None] = []
    agreed: list[Agreement] = []
    async with LiveClient(live.url) as client:
        offers = await client.offers(model, _SAMPLE)
        contexts = [offers.context]
        if first is not None:
            client.level = max(client.level, first.offers.level)
            contexts.append(first.offers.context)
        context = min((c for c in contexts if c is not None), default=None)
        for at, traffic in enumerate(traffics(offers)):
            before = await asyncio.to_thread(source.read)
            run = await replay(traffic, client, context, progress.replaying(name, traffic))
            runs.append(run)
            stopped = bool(run.interrupted or run.died)
            after = None if stopped else await asyncio.to_thread(source.read)
            counted.append(after - before if after and before else None)
            if first is not None and at < len(first.runs):
                found = agreement(first.runs[at], run)
                if not stopped:
                    found = await _with_margins((client, first), traffic, run, found)
                agreed.append(found)
            if stopped:
                break
    state = source.state()
    device, backend = (state.device, state.backend) if state else ("", "")
    side = SideRun(
        name, live.url, offers, tuple(runs), tuple(counted), tuple(agreed), device, backend
    )
    return side, any(run.interrupted for run in runs)


def silent_side(side: Side, first: SideRun, why: str) -> SideRun:
    """The run of a second server that answered nothing."""
    nothing = tuple(Replayed((), 0.0, died=why) for _ in first.runs)
    return SideRun(side.name, "", first.offers, nothing, (), (), "", "")


def compare_sides(
    names: tuple[str, str], sides: Sequence[SideRun], traffics: Sequence[Traffic],
    interrupted: bool, provenance: Mapping[str, object],
) -> LiveResult:  # fmt: skip
    """The result of two runs, or of what there is of them."""
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
                (counts[0], counts[1]), agreed[at] if at < len(agreed) else Agreement(0, 0),
            )
        )  # fmt: skip
    return LiveResult(names, tuple(sides), tuple(workloads), interrupted, provenance)


def agreement(first: Replayed, second: Replayed) -> Agreement:
    """Compare the answers that both servers gave, by token ids, else by text."""
    theirs = {(o.name, o.index): o.answer for o in second.outcomes if o.answer is not None}
    compared = equal = 0
    found = []
    for outcome in first.outcomes:
        other = theirs.get((outcome.name, outcome.index))
        if outcome.answer is None or other is None:
            continue
        compared += 1
        at = _differs(outcome.answer, other)
        if at is None:
            equal += 1
        else:
            name = f"{outcome.name} #{outcome.index}" if outcome.index else outcome.name
            found.append(Difference(name, at, None))
    return Agreement(compared, equal, tuple(found))


async def _with_margins(
    servers: tuple[LiveClient, SideRun], traffic: Traffic, run: Replayed, found: Agreement
) -> Agreement:
    """Ask how close the two likeliest tokens were at the first differences."""
    requests = {request.name: request for request in traffic.requests}
    answers = {(o.name, o.index): o.answer for o in run.outcomes}
    client, first = servers
    asked = []
    async with LiveClient(first.url, seconds=60.0) as other:
        other.model = first.offers.model
        for at, difference in enumerate(found.differences):
            name, _, index = difference.name.partition(" #")
            request, answer = requests[name], answers[name, int(index or 0)]
            margin = None
            if at < MARGINS and request.after is None and answer is not None:
                prompt = request.prompt() + "".join(answer.tokens[: difference.position])
                margins = [await server.margin(prompt) for server in (client, other)]
                margin = max((m for m in margins if m is not None), default=None)
            asked.append(replace(difference, margin=margin))
    return replace(found, differences=tuple(asked))


def figures(run: Replayed) -> Figures:
    """What one side did."""
    answers = [o.answer for o in run.outcomes if o.answer is not None]
    ttft = [answer.ttft for answer in answers]
    tpot = [gap for answer in answers if (gap := answer.tpot) is not None]
    lost = Tally(o.status for o in run.outcomes if o.status != ANSWERED)
    late = [o.sent - o.at for o in run.outcomes if o.answer is not None and o.at]
    tokens = sum(len(answer.arrivals) for answer in answers)
    return Figures(
        answered=len(answers),
        lost=dict(lost),
        ttft=_quantile(ttft, 0.5),
        ttft_p95=_quantile(ttft, 0.95),
        tpot=_quantile(tpot, 0.5),
        tpot_p95=_quantile(tpot, 0.95),
        tokens_a_second=tokens / run.seconds if run.seconds else None,
        prompt_tokens=sum(o.prompt_tokens or 0 for o in run.outcomes),
        late_p95=_quantile(late, 0.95),
    )


def _quantile(values: Sequence[float], part: float) -> float | None:
    if not values:
        return None
    if part == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]


def _differs(first: Answer, second: Answer) -> int | None:
    """Tokens before the first difference; None if the answers are equal."""
    counts = len(first.arrivals), len(second.arrivals)
    if (len(first.ids), len(second.ids)) == counts:
        if first.ids == second.ids:
            return None
        at = first_difference(first.ids, second.ids)
        return min(counts) if at is None else at
    if first.text == second.text:
        return None
    characters = first_difference(first.text, second.text)
    shorter = min(len(first.text), len(second.text))
    at = shorter if characters is None else characters
    return round(at * counts[0] / max(1, len(first.text)))


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

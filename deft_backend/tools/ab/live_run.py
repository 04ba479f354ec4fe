"""One side of a comparison over time: all traffic to one server, and what it answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from deft_backend.telemetry.counters import Counters
from deft_backend.tools.ab.invented_text import passage
from deft_backend.tools.ab.live_agreement import CLOSE, LiveAgreement, agreement
from deft_backend.tools.harness.answers import EIGHT_BITS, Answer
from deft_backend.tools.harness.live_client import LiveClient, Offers
from deft_backend.tools.harness.live_counters import LiveCounters
from deft_backend.tools.harness.replay import Replayed, replay
from deft_backend.tools.harness.traffic import Traffic

MARGINS = 12
"""Most different answers of a workload for which both servers tell their margins."""

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
    """All traffic on one server.

    ``eight_bits`` says that its KV cache has 8 bits, by its state file.
    """

    name: str
    url: str
    offers: Offers
    runs: tuple[Replayed, ...]
    counters: tuple[Counters | None, ...]
    agreements: tuple[LiveAgreement, ...]
    device: str
    backend: str
    eight_bits: bool = False


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
    agreed: list[LiveAgreement] = []
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
    eight_bits = state is not None and state.dtype_bytes == 1
    if eight_bits or (first is not None and first.eight_bits):
        agreed = [replace(found, close=CLOSE * EIGHT_BITS) for found in agreed]
    side = SideRun(
        name, live.url, offers, tuple(runs), tuple(counted), tuple(agreed), device, backend,
        eight_bits,
    )  # fmt: skip
    return side, any(run.interrupted for run in runs)


def silent_side(side: Side, first: SideRun, why: str) -> SideRun:
    """The run of a second server that answered nothing."""
    nothing = tuple(Replayed((), 0.0, died=why) for _ in first.runs)
    return SideRun(side.name, "", first.offers, nothing, (), (), "", "")


async def _with_margins(
    servers: tuple[LiveClient, SideRun], traffic: Traffic, run: Replayed, found: LiveAgreement
) -> LiveAgreement:
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
                known = _complete(answer, difference.position)
                prompt = request.prompt() + "".join(answer.tokens[:known])
                ahead = difference.position - known
                margins = [await server.margin(prompt, ahead) for server in (client, other)]
                margin = max((m for m in margins if m is not None), default=None)
            asked.append(replace(difference, margin=margin))
    return replace(found, differences=tuple(asked))


def _complete(answer: Answer, position: int) -> int:
    """The last token up to `position` before which the streamed text is complete.

    A piece of the stream may hold several tokens, and a token may hold a part of a character.
    """
    start = len(answer.tokens)
    for at in range(len(answer.tokens) - 1, -1, -1):
        if at and answer.arrivals[at] == answer.arrivals[at - 1]:
            continue  # the same piece
        if start <= position and answer.tokens[at]:
            return start
        start = at
    return 0

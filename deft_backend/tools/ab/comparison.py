"""A comparison: all workloads on both servers, one after the other, and their answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from deft_backend.files.provenance import provenance
from deft_backend.telemetry.counters import Counters
from deft_backend.tools.ab.agreement import CLOSE, MARGINS, Agreement, agreement
from deft_backend.tools.ab.result import AbResult, SideRun, compare_sides
from deft_backend.tools.ab.sides import Progress, RunningServer, Side
from deft_backend.tools.harness.answers import EIGHT_BITS, Answer
from deft_backend.tools.harness.client import Offers, ServerClient, ServerError
from deft_backend.tools.harness.open_loop import Goodput, GoodputSearch, Seen
from deft_backend.tools.harness.workload import Replayed, Workload, replay
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.traces.invented import passage

_SAMPLE = passage(4000, "sample")


class GoodputAsked(NamedTuple):
    bound_ms: float
    rate: float  # requests a second, of the first trial


def both_answer(urls: Sequence[str]) -> None:
    """Before a long run on the first server, check that both servers answer."""

    async def ask() -> None:
        for url in urls:
            async with ServerClient(url) as client:
                await client.models()

    asyncio.run(ask())


def compare(
    sides: tuple[Side, Side],
    build: Callable[[Offers], list[Workload]],
    model: str | None,
    progress: Progress,
    *,
    exact: bool,
    goodput: GoodputAsked | None = None,
) -> AbResult:
    made: list[Workload] = []

    def workloads(offers: Offers) -> list[Workload]:
        if not made:
            made.extend(build(offers))
        return made

    runs: list[SideRun] = []
    interrupted = False
    for side in sides:
        first = runs[0] if runs else None
        try:
            with side.open() as server:
                run = asyncio.run(
                    _run_side(server, side.name, workloads, model, first, progress, exact, goodput)
                )
        except ServerError as error:
            if first is None:
                raise
            run = _silent_side(side, first, str(error))  # keep what the first one did
        except KeyboardInterrupt:  # while the second server starts
            if first is None:
                raise
            interrupted = True
            break
        runs.append(run)
        interrupted = any(replayed.interrupted for replayed in run.runs)
        if interrupted:
            break
    names = (sides[0].name, sides[1].name)
    return compare_sides(
        names, runs, made, interrupted=interrupted, provenance=provenance(), exact=exact
    )


async def _run_side(
    server: RunningServer,
    name: str,
    workloads: Callable[[Offers], Sequence[Workload]],
    model: str | None,
    first: SideRun | None,
    progress: Progress,
    exact: bool,
    goodput: GoodputAsked | None,
) -> SideRun:
    """Send all workloads to one server; after `first`, equal requests, and compare the answers.
    Raises ServerError if the server does not answer at all, AbError if the plugin counted no decode
    step.
    """
    source = server.counters()
    runs: list[Replayed] = []
    counted: list[Counters | None] = []
    agreements: list[Agreement] = []
    goodputs: list[Goodput] = []
    async with ServerClient(server.url, logprobs=exact) as client:
        offers = await client.offers(model, _SAMPLE)
        contexts = [offers.context]
        if first is not None:
            client.exact_lengths = offers.exact_lengths and first.offers.exact_lengths
            contexts.append(first.offers.context)
        context = min((c for c in contexts if c is not None), default=None)
        for at, workload in enumerate(workloads(offers)):
            before = await asyncio.to_thread(source.read)
            run = await replay(workload, client, context, progress.replaying(workload))
            runs.append(run)
            stopped = bool(run.interrupted or run.died)
            after = None if stopped else await asyncio.to_thread(source.read)
            counted.append(after - before if after and before else None)
            if first is not None and at < len(first.runs):
                parents = {request.name: request.continues for request in workload.requests}
                compared = agreement(first.runs[at], run, parents)
                if not stopped:
                    compared = await _with_margins((client, first), workload, run, compared)
                agreements.append(compared)
            if goodput is not None and not stopped:
                search = await _goodput(workload, client, context, progress, goodput)
                goodputs += [] if isinstance(search, Replayed) else [search]
                if isinstance(search, Replayed):  # the run ends here
                    runs[-1] = replace(run, died=search.died, interrupted=search.interrupted)
                    stopped = True
            if stopped:
                break
    if runs and runs[-1].died:
        try:
            server.check_alive()
        except StartError as error:  # the end of its log tells more than a lost request
            runs[-1] = replace(runs[-1], died=str(error))
    elif not any(run.interrupted for run in runs):
        await asyncio.to_thread(server.check_counted)
    state = source.state()
    eight_bits = state is not None and state.dtype_bytes == 1
    if eight_bits or (first is not None and first.eight_bits):
        agreements = [replace(compared, close=CLOSE * EIGHT_BITS) for compared in agreements]
    told = (state.device, state.backend, state.policy) if state else ("", "", "")
    measured = (tuple(runs), tuple(counted), tuple(agreements), tuple(goodputs))
    return SideRun(name, server.url, offers, *measured, *told, eight_bits, server.command)


async def _goodput(
    workload: Workload,
    client: ServerClient,
    context: int | None,
    progress: Progress,
    asked: GoodputAsked,
) -> Goodput | Replayed:
    """Try rates, each with other texts; a run that the server or the user ended instead."""
    search, turn = GoodputSearch(asked.rate, asked.bound_ms), 0
    while (rate := search.next_rate()) is not None:
        turn += 1
        sent = workload.arriving(rate).renewed(turn)
        run = await replay(sent, client, context)
        if run.died or run.interrupted:
            return run
        p99 = Seen.of(run).p99_ms
        search.tell(rate, p99)
        said = "a request failed" if p99 is None else f"99 % of gaps below {p99:.1f} ms"
        progress.announce(f"{workload.name}, {rate:.3g} requests a second: {said}")
    return search.found()


async def _with_margins(
    servers: tuple[ServerClient, SideRun], workload: Workload, run: Replayed, compared: Agreement
) -> Agreement:
    """Ask how close the two likeliest tokens were, where the answers do not tell."""
    requests = {request.name: request for request in workload.requests}
    answers = {outcome.name: outcome.answer for outcome in run.outcomes}
    client, first = servers
    asked = []
    async with ServerClient(first.url, seconds=60.0) as other:
        other.model = first.offers.model
        for at, difference in enumerate(compared.differences):
            request, answer = requests[difference.name], answers[difference.name]
            margin = difference.margin
            if margin is None and at < MARGINS and request.after is None and answer is not None:
                known = _complete(answer, difference.position)
                prompt = f"{request.own_part()}{''.join(answer.tokens[:known])}"
                ahead = difference.position - known
                margins = [await server.margin(prompt, ahead) for server in (client, other)]
                margin = max((m for m in margins if m is not None), default=None)
            asked.append(replace(difference, margin=margin))
    return replace(compared, differences=tuple(asked))


def _complete(answer: Answer, position: int) -> int:
    """The last token up to `position` before which the streamed text is complete."""
    start = len(answer.tokens)
    for at in range(len(answer.tokens) - 1, -1, -1):
        if at and answer.arrivals[at] == answer.arrivals[at - 1]:
            continue  # the same piece
        if start <= position and answer.tokens[at]:
            return start
        start = at
    return 0


def _silent_side(side: Side, first: SideRun, why: str) -> SideRun:
    nothing = tuple(Replayed((), 0.0, died=why) for _ in first.runs)
    return SideRun(side.name, "", first.offers, nothing, (), (), ())

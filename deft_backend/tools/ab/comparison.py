"""A comparison: all workloads on both servers, one after the other, and their answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from deft_backend.files.provenance import provenance
from deft_backend.tools.ab.agreement import CLOSE, MARGINS, Agreement, agreement
from deft_backend.tools.ab.result import AbResult, ComparedWorkload, Measured, Server
from deft_backend.tools.ab.sides import Progress, RunningServer, Sides
from deft_backend.tools.harness.answers import EIGHT_BITS
from deft_backend.tools.harness.client import Offers, ServerClient, ServerError
from deft_backend.tools.harness.open_loop import Figures, Goodput, GoodputSearch
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
    sides: Sides,
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

    sent: list[tuple[Server, list[Measured]]] = []
    interrupted = False
    for name, opened in sides.items():
        first = sent[0] if sent else None
        try:
            with opened() as server:
                run = asyncio.run(
                    _run_side(server, name, workloads, model, first, progress, exact, goodput)
                )
        except ServerError as error:
            if first is None:
                raise
            # Keep what the first one did.
            silent = [Measured(Replayed((), 0.0, died=str(error))) for _ in first[1]]
            run = Server(name, "", first[0].offers), silent
        except KeyboardInterrupt:  # while the second server starts
            if first is None:
                raise
            interrupted = True
            break
        sent.append(run)
        interrupted = any(measured.run.interrupted for measured in run[1])
        if interrupted:
            break
    nothing = Measured(Replayed((), 0.0, interrupted=interrupted))
    columns = [*(measured for _, measured in sent), []][:2]
    compared = []
    for workload, (one, two) in zip(made, zip_longest(*columns, fillvalue=nothing), strict=False):
        if one.run.outcomes or two.run.outcomes:
            texts = (workload.name, workload.description, workload.arrivals)
            same = two.agreement or Agreement(0, 0)
            compared.append(ComparedWorkload(*texts, (one, two), same))
    old, new = sides
    servers = tuple(server for server, _ in sent)
    return AbResult((old, new), servers, tuple(compared), interrupted, provenance(), exact)


async def _run_side(
    server: RunningServer,
    name: str,
    workloads: Callable[[Offers], Sequence[Workload]],
    model: str | None,
    first: tuple[Server, list[Measured]] | None,
    progress: Progress,
    exact: bool,
    goodput: GoodputAsked | None,
) -> tuple[Server, list[Measured]]:
    """Send all workloads to one server; after `first`, equal requests, and compare the answers.
    Raises ServerError if the server does not answer at all, AbError if the plugin counted no decode
    step.
    """
    source = server.counters()
    found: list[Measured] = []
    async with ServerClient(server.url, logprobs=exact) as client:
        offers = await client.offers(model, _SAMPLE)
        state = await asyncio.to_thread(source.state)
        described = Server(name, server.url, offers, command=server.command)
        if state is not None:
            described = replace(
                described,
                device=state.device,
                backend=state.backend,
                policy=state.policy,
                eight_bits=state.dtype_bytes == 1,
            )
        contexts, close = [offers.context], CLOSE
        if first is not None:
            contexts.append(first[0].offers.context)
            close *= EIGHT_BITS if described.eight_bits or first[0].eight_bits else 1
        context = min((c for c in contexts if c is not None), default=None)
        for at, workload in enumerate(workloads(offers)):
            before = await asyncio.to_thread(source.read)
            run = await replay(workload, client, context, progress.replaying(workload))
            stopped = bool(run.interrupted or run.died)
            after = None if stopped else await asyncio.to_thread(source.read)
            measured = Measured(run, after - before if after and before else None)
            if first is not None and at < len(first[1]):
                parents = {request.name: request.continues for request in workload.requests}
                compared = replace(agreement(first[1][at].run, run, parents), close=close)
                if not stopped:
                    compared = await _with_margins((client, first[0]), workload, run, compared)
                measured = replace(measured, agreement=compared)
            if goodput is not None and not stopped:
                search = await _goodput(workload, client, context, progress, goodput)
                if isinstance(search, Replayed):  # the run ends here
                    run = replace(run, died=search.died, interrupted=search.interrupted)
                    measured, stopped = replace(measured, run=run), True
                else:
                    measured = replace(measured, goodput=search)
            found.append(measured)
            if stopped:
                break
    if found and found[-1].run.died:
        try:
            server.check_alive()
        except StartError as error:  # the end of its log tells more than a lost request
            found[-1] = replace(found[-1], run=replace(found[-1].run, died=str(error)))
    elif not any(measured.run.interrupted for measured in found):
        await asyncio.to_thread(server.check_counted)
    return described, found


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
        p99 = Figures.of(run).p99_ms
        search.tell(rate, p99)
        said = "a request failed" if p99 is None else f"99 % of gaps below {p99:.1f} ms"
        progress.announce(f"{workload.name}, {rate:.3g} requests a second: {said}")
    return search.found()


async def _with_margins(
    servers: tuple[ServerClient, Server], workload: Workload, run: Replayed, compared: Agreement
) -> Agreement:
    """Ask how close the two likeliest tokens were, where the answers do not tell."""
    requests = {request.name: request for request in workload.requests}
    answers = run.answers
    client, first = servers
    asked = []
    async with ServerClient(first.url, seconds=60.0) as other:
        other.model = first.offers.model
        for at, difference in enumerate(compared.differences):
            request, answer = requests[difference.name], answers[difference.name]
            margin = difference.margin
            if margin is None and at < MARGINS and request.after is None:
                asked_of = (request.own_part(), answer.ids[: difference.position])
                margins = [await server.margin(*asked_of) for server in (client, other)]
                margin = max((m for m in margins if m is not None), default=None)
            asked.append(replace(difference, margin=margin))
    return replace(compared, differences=tuple(asked))

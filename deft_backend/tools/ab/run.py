"""One side of a comparison: all workloads on one server, and its answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deft_backend.telemetry.counters import Counters
from deft_backend.tools.ab.agreement import CLOSE, Agreement, agreement
from deft_backend.tools.ab.progress import Progress
from deft_backend.tools.ab.sides import RunningServer
from deft_backend.tools.harness.answers import EIGHT_BITS, Answer
from deft_backend.tools.harness.client import Offers, ServerClient
from deft_backend.tools.harness.replay import Replayed, replay
from deft_backend.tools.harness.workload import Workload
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.speculation import acceptance_length
from deft_backend.tools.traces.invented_text import passage

MARGINS = 12  # most different answers of a workload for which both servers tell their margins

_SAMPLE = passage(4000, "sample")


@dataclass(frozen=True)
class SideRun:
    """All workloads on one server."""

    name: str
    url: str
    offers: Offers
    runs: tuple[Replayed, ...]
    counters: tuple[Counters | None, ...]
    agreements: tuple[Agreement, ...]
    # By its state file; empty without one.
    device: str = ""
    backend: str = ""
    policy: str = ""
    eight_bits: bool = False  # whether its KV cache has 8 bits, by its state file
    command: str = ""  # its command, if this process started it
    # Tokens that a verification gave on average; None if it does not speculate.
    acceptance_length: float | None = None


async def run_side(
    server: RunningServer, name: str, workloads: Callable[[Offers], Sequence[Workload]],
    model: str | None, first: SideRun | None, progress: Progress, exact: bool = False,
) -> tuple[SideRun, bool]:  # fmt: skip
    """Send all workloads to one server; the second value tells whether the run was interrupted.

    - `workloads`: makes the workloads for what the server offers.
    - `first`: the other server's run. This one then gets equal requests, and its answers are
      compared.
    - `exact`: ask for the log-probability of every token.

    Raises ServerError if the server does not answer at all. Raises AbError if the plugin was asked
    for, and counted no decode step.
    """
    source = server.counters()
    runs: list[Replayed] = []
    counted: list[Counters | None] = []
    agreements: list[Agreement] = []
    async with ServerClient(server.url, logprobs=exact) as client:
        offers = await client.offers(model, _SAMPLE)
        contexts = [offers.context]
        if first is not None:
            client.level = max(client.level, first.offers.level)
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
                parents = {request.name: request.after for request in workload.requests}
                compared = agreement(first.runs[at], run, parents)
                if not stopped:
                    compared = await _with_margins((client, first), workload, run, compared)
                agreements.append(compared)
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
    side = SideRun(
        name, server.url, offers, tuple(runs), tuple(counted), tuple(agreements),
        *((state.device, state.backend, state.policy) if state else ("", "", "")),
        eight_bits, server.command, await asyncio.to_thread(acceptance_length, server.url),
    )  # fmt: skip
    return side, any(run.interrupted for run in runs)


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
                prompt = request.text() + "".join(answer.tokens[:known])
                ahead = difference.position - known
                margins = [await server.margin(prompt, ahead) for server in (client, other)]
                margin = max((m for m in margins if m is not None), default=None)
            asked.append(replace(difference, margin=margin))
    return replace(compared, differences=tuple(asked))


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

"""Sends the requests of a workload of token ids to a server, and collects the answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.token_client.client import Client
from benchmarks.token_client.dialects import ClientError
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Request, Workload

Ids = tuple[int, ...]


@dataclass(frozen=True)
class TreeRequest(Request):
    """A request that other branches return to, or that branches by itself.

    Attributes
    ----------
    returned : tuple of str
        Requests whose answers follow the answer that this request continues: what sub-agents found
        stands before the next turn's own text.
    beams : int
        Width of a beam search; 1: none.
    sampled : bool
        Sample at temperature 1, and take the answer as a whole.
    """

    returned: tuple[str, ...] = ()
    beams: int = 1
    sampled: bool = False

    @property
    def streamed(self) -> bool:
        """Whether the answer arrives token by token."""
        return self.beams == 1 and not self.sampled


class SendError(RuntimeError):
    """The server refused, lost or cut off a request; the message names workload and request."""


async def send_requests(workload: Workload, client: Client) -> list[Answer]:
    """Send all requests, each as soon as the requests that it continues have ended.

    Returns
    -------
    list of Answer
        In the workload's order; of a beam search, every beam, best first.

    Raises
    ------
    SendError
        If a request fails; the others are cancelled.
    """
    running: dict[str, asyncio.Task[tuple[Ids, list[Answer]]]] = {}

    async def run(request: Request) -> tuple[Ids, list[Answer]]:
        prompt = request.prompt
        if not isinstance(prompt, tuple):
            raise TypeError(f"{request.name} has text; expected token ids")
        if request.after is not None:
            earlier, above = await asyncio.shield(running[request.after])
            for name in request.returned if isinstance(request, TreeRequest) else ():
                above = [*above, *(await asyncio.shield(running[name]))[1]]
            prompt = (*earlier, *(id for answer in above for id in answer.ids), *prompt)
        try:
            answers = await _answers(request, prompt, client)
        except ClientError as error:
            raise SendError(f"{workload.name}, {request.name}: {error}") from error
        for answer in answers:
            answer.request = request.name
        return prompt, answers

    for request in workload.requests:
        running[request.name] = asyncio.create_task(run(request))
    try:
        done = await asyncio.gather(*running.values())
    except BaseException:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        raise
    return [answer for _, answers in done for answer in answers]


async def _answers(request: Request, prompt: Ids, client: Client) -> list[Answer]:
    if isinstance(request, TreeRequest) and not request.streamed:
        return await client.whole(
            prompt, request.max_tokens, beams=request.beams, sampled=request.sampled
        )
    return [await client.stream(prompt, request.max_tokens)]

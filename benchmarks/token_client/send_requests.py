"""Sends the requests of a workload of token ids to a server, and collects the answers."""

from __future__ import annotations

import asyncio

from benchmarks.token_client.client import Client
from benchmarks.token_client.dialects import ClientError
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Request, Workload

Ids = tuple[int, ...]


class SendError(RuntimeError):
    """The server refused, lost or cut off a request; the message names workload and request."""


async def send_requests(workload: Workload, client: Client) -> list[Answer]:
    """Send all requests, each as soon as the request that it continues has ended.

    Returns
    -------
    list of Answer
        In the workload's order.

    Raises
    ------
    SendError
        If a request fails; the others are cancelled.
    """
    running: dict[str, asyncio.Task[tuple[Ids, Answer]]] = {}

    async def run(request: Request) -> tuple[Ids, Answer]:
        prompt = request.prompt
        if not isinstance(prompt, tuple):
            raise TypeError(f"{request.name} has text; expected token ids")
        if request.after is not None:
            earlier, above = await asyncio.shield(running[request.after])
            prompt = (*earlier, *above.ids, *prompt)
        try:
            answer = await client.stream(prompt, request.max_tokens)
        except ClientError as error:
            raise SendError(f"{workload.name}, {request.name}: {error}") from error
        answer.request = request.name
        return prompt, answer

    for request in workload.requests:
        running[request.name] = asyncio.create_task(run(request))
    try:
        done = await asyncio.gather(*running.values())
    except BaseException:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        raise
    return [answer for _, answer in done]

"""Requests over a ragged forest of token ids; some join late, and some hang up."""

import asyncio
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    tokens: int  # of its answer
    leave_after: int | None = None  # hangs up after this many tokens
    joins: bool = False  # is sent while the others decode


def requests(ids, seed):
    """Two trees (one has three levels), equal prompts and unshared prompts."""
    choose = random.Random(seed)

    def draw(tokens):
        return tuple(choose.randrange(ids) for _ in range(tokens))

    def asked(prompt):
        tokens = choose.randint(16, 72)
        leaves = choose.random() < 0.15
        return Asked(
            prompt,
            tokens,
            choose.randint(2, tokens - 1) if leaves else None,
            choose.random() < 0.25,
        )

    root, other = draw(3001), draw(1500)
    middles = [root + draw(choose.randint(1, 900)) for _ in range(3)]
    prompts = [middle + draw(choose.randint(1, 150)) for middle in middles for _ in range(8)]
    prompts += [other + draw(choose.randint(1, 40)) for _ in range(6)]
    prompts += [prompts[0], prompts[0], root]
    prompts += [draw(choose.randint(1, 900)) for _ in range(5)]
    return [asked(prompt) for prompt in prompts]


async def answered(client, asked):
    """Prompts and answers of the requests that did not hang up."""

    async def one(request):
        if request.joins:
            await asyncio.sleep(0.1)
        found, _ = await client.ask(request.prompt, request.tokens, leave_after=request.leave_after)
        return None if request.leave_after is not None else (request.prompt, found.ids)

    found = await asyncio.gather(*(one(request) for request in asked))
    return [sample for sample in found if sample is not None]

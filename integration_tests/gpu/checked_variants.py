"""What the tests of both hosts' servers on GPUs share: requests over a ragged forest, some of which
join late or hang up, and where comparisons are written."""

import asyncio
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.e2e.answers import TOLERANCE, check
from benchmarks.e2e.run import client_of as connected
from deft_backend.files.provenance import provenance
from integration_tests.gpu.variants import FLEET


def reported_states(name, variant, ours):
    """The states of a server's ranks; ranks that decode the same batches took the same steps."""
    states = [ours.state(each) for each in variant.states]
    counts = "steps_tree steps_host plans kv_bytes_read kv_bytes_query_guided verified_tokens"
    late = ours.log.count(" at its first launch, in ")
    report(
        name, "steps", {**{each: states[0][each] for each in counts.split()}, "compiled_late": late}
    )
    if variant.in_step:
        assert len({state["steps_tree"] for state in states}) == 1
    return states


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


def tolerance(variant):
    """Largest difference of log-probability at which another token is a tie."""
    return TOLERANCE["float16" if variant == "float16" else "bfloat16"]


def client_of(server, adapter=None):
    field = {"sglang": "lora_path", "vllm": "model"}[FLEET.host]
    return connected(server.process.url, fields={field: adapter} if adapter else {})


async def answers(ours, model, adapter=None, *, alone=False):
    """Prompts and answers of two rounds of a forest; `alone`: prompts are computed one by one."""
    samples = []
    async with client_of(ours, adapter) as client:
        for seed in range(2):
            asked = requests(model.ids, seed)
            for each in asked if alone else ():
                await client.batch([each.prompt], 1)
            samples += await answered(client, asked)
    return samples


async def compared(samples, theirs, tolerance, adapter=None, *, alone=False):
    """What the host's server says about the answers."""
    async with client_of(theirs, adapter) as client:
        for prompt, _ in samples if alone else ():
            await client.batch([prompt], 1)
        found = await check(samples, client, tolerance, at_once=1 if alone else 64)
    return found.to_dict(tolerance)


def report(variant, what, found):
    """Add to the variant's file in the folder that the environment names, if any."""
    if folder := os.environ.get("GPU_REPORT"):
        file = Path(folder) / f"{variant}.json"
        known = json.loads(file.read_text()) if file.is_file() else {"header": provenance()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**known, what: found}, indent=1))

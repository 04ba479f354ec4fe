"""What the tests of both hosts' servers on GPUs check, and where their comparisons are written."""

import asyncio
import json
import os
from pathlib import Path

from benchmarks.e2e.answers import TOLERANCE, check
from benchmarks.e2e.run import client_of as connected
from deft_backend.files.provenance import provenance
from integration_tests.gpu.forest_traffic import answered, requests
from integration_tests.gpu.variants import ADAPTERS

TOO_FEW = "batch smaller than DEFT_MIN_BATCH=2"
UNSPLIT = ("shares too little to be split", "in a graph of prefills")  # of mixed steps

MOSTLY = 0.9
"""Least share of equal tokens, not just ties, in a correct run."""


NOISE = 2.0
"""How many times less likely than :data:`TOLERANCE` allows a token of an adapter may be.

Random adapters make attention sharper, so the same rounding of softmax weights changes the logits
more: 1.3 to 2 times in a model of four layers. With the KV of another adapter, tokens are
several units less likely.
"""


def check_every_token(fleet, variant, pair, model, *adapters):
    """Two rounds of a forest whose requests join, end and hang up."""
    check_answers(fleet, variant, pair, model, "forest", [(name,) for name in adapters or (None,)])


def check_adapters(fleet, variant, pair, model):
    """The base and both adapters decode the same forest together, and answer as alone.

    Prompts of the same tokens have other KV behind each adapter: nothing of it may be shared.
    """
    check_answers(fleet, variant, pair, model, "together", [(None, *ADAPTERS)])


def check_answers(fleet, variant, pair, model, what, mixes):
    """The host checks the answers to each mix of adapters, which decode together."""
    ours, theirs = pair

    async def judged():
        found = {}
        for mix in mixes:
            batch = await asyncio.gather(*(answers(fleet, ours, model, name) for name in mix))
            assert len({tuple(tuple(ids) for _, ids in samples) for samples in batch}) == len(mix)
            for name, samples in zip(mix, batch, strict=True):
                limit = tolerance(variant) * (NOISE if name else 1.0)
                found[name or "base"] = await compared(fleet, samples, theirs, name, limit)
        return found

    found = asyncio.run(judged())
    report(variant, what, found)
    for result in found.values():
        assert not result["wrong"], found
        assert result["tokens"] > 2000
        assert result["ties"] < (1 - MOSTLY) * result["tokens"]
    assert not ours.trouble()


def check_steps(fleet, variant, ours):
    """Every step that shares KV went through tree attention, on every rank, and read less KV.

    A server that checks others' answers decodes many requests alone.
    """
    this = fleet.variants[variant]
    states = reported_states(variant, this, ours)
    for state in states:
        assert state["steps_tree"] > 100
        assert state["kv_bytes_read"] < 0.6 * state["kv_bytes_query_guided"]
        assert set(state["steps_host"]) <= {TOO_FEW, *UNSPLIT}
        if variant not in {other.against for other in fleet.variants.values()}:
            assert state["steps_host"].get(TOO_FEW, 0) < 0.2 * state["steps_tree"]


def reported_states(name, variant, ours):
    """The states of a server's ranks; ranks that decode the same batches took the same steps."""
    states = [ours.state(each) for each in variant.states]
    counts = (
        "steps_tree",
        "steps_host",
        "plans",
        "kv_bytes_read",
        "kv_bytes_query_guided",
        "verified_tokens",
    )
    late = ours.log.count(" at its first launch, in ")
    report(name, "steps", {**{each: states[0][each] for each in counts}, "compiled_late": late})
    if variant.in_step:
        assert len({state["steps_tree"] for state in states}) == 1
    return states


def tolerance(variant):
    """Largest difference of log-probability at which another token is a tie."""
    return TOLERANCE["float16" if variant == "float16" else "bfloat16"]


def client_of(fleet, server, adapter=None):
    field = {"sglang": "lora_path", "vllm": "model"}[fleet.host]
    fields = {field: adapter} if adapter else {}
    return connected(server.process.url, fields=fields)


async def checked(fleet, pair, model, adapter, tolerance):
    """One server's answers to the forest, checked by the other."""
    ours, theirs = pair
    samples = await answers(fleet, ours, model, adapter)
    return await compared(fleet, samples, theirs, adapter, tolerance)


async def answers(fleet, ours, model, adapter):
    samples = []
    async with client_of(fleet, ours, adapter) as client:
        for seed in range(2):
            samples += await answered(client, requests(model.ids, seed))
    return samples


async def compared(fleet, samples, theirs, adapter, tolerance):
    async with client_of(fleet, theirs, adapter) as client:
        return (await check(samples, client, tolerance, at_once=64)).to_dict(tolerance)


def report(variant, what, found):
    """Add to the variant's file in the folder that the environment names, if any."""
    if folder := os.environ.get("GPU_REPORT"):
        file = Path(folder) / f"{variant}.json"
        known = json.loads(file.read_text()) if file.is_file() else {"header": provenance()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**known, what: found}, indent=1))

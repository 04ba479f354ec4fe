"""On GPUs: every token of every variant equals the host's own, or is a tie that rounding decides.

Servers run with asynchronous scheduling and CUDA graphs. If the environment names a folder in
``GPU_REPORT``, the comparisons are written there.
"""

import asyncio
from pathlib import Path

import pytest

from benchmarks.e2e.answers import LIKELIEST
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.control import changed_weights
from integration_tests.common.server import ask_to
from integration_tests.gpu.checked_variants import (
    answers,
    client_of,
    compared,
    report,
    reported_states,
    requests,
    tolerance,
)
from integration_tests.gpu.variants import ADAPTERS, FLEET

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")


def on(*names):
    """For those of these variants that the installed host has; for all of its own, if none."""
    mine = [name for name in names or FLEET.variants if name in FLEET.servers]
    return pytest.mark.parametrize("variant", mine, indirect=True)


TOO_FEW = "batch smaller than DEFT_MIN_BATCH=2"
WITHOUT_GRAPH = (
    "in a graph of prefills",
    "a step with prefills whose other requests share too little",
    "an eager step whose requests share too little",
)

MOSTLY = 0.9
"""Least share of equal tokens, not just ties, in a correct run."""


NOISE = 2.0
"""How many times less likely than :data:`TOLERANCE` allows a token of an adapter may be.

Random adapters make attention sharper, so the same rounding of softmax weights changes the logits
more: 1.3 to 2 times in a model of four layers. With the KV of another adapter, tokens are
several units less likely.
"""


def check_answers(variant, pair, model, what, mixes):
    """The host checks the answers to each mix of adapters, which decode together."""
    ours, theirs = pair

    async def judged():
        found = {}
        for mix in mixes:
            batch = await asyncio.gather(*(answers(ours, model, name) for name in mix))
            assert len({tuple(tuple(ids) for _, ids in samples) for samples in batch}) == len(mix)
            for name, samples in zip(mix, batch, strict=True):
                limit = tolerance(variant) * (NOISE if name else 1.0)
                found[name or "base"] = await compared(samples, theirs, limit, name)
        return found

    found = asyncio.run(judged())
    report(variant, what, found)
    for result in found.values():
        assert not result["wrong"], found
        assert result["tokens"] > 2000
        assert result["ties"] < (1 - MOSTLY) * result["tokens"]
    assert not ours.trouble()


@on(*FLEET.variants, "host-disaggregated", "host-dflash")
def test_every_token_is_the_hosts(variant, pair, model):
    """Two rounds of a forest whose requests join, end and hang up.

    The host does not draft when it checks. Random drafts are refused, so a step's first token alone
    is an answer.
    """
    alone = FLEET.host == "sglang" and FLEET.servers[variant].lora
    names = (None, *ADAPTERS) if alone else (None,)
    check_answers(variant, pair, model, "forest", [(name,) for name in names])


@on("lora")
def test_adapters_beside_their_base(variant, pair, model):
    """The base and both adapters decode the same forest together, and answer as alone.

    Prompts of the same tokens have other KV behind each adapter: nothing of it may be shared.
    """
    check_answers(variant, pair, model, "together", [(None, *ADAPTERS)])


@on("memory-saver")
def test_memory_is_released_and_weights_change(variant, pair, model, tmp_path):
    """As an RL trainer does after each step: release, resume, new weights, samples."""
    ours, _ = pair

    def renew(path):
        assert ask_to(ours, "release_memory_occupation") == 200
        assert ask_to(ours, "resume_memory_occupation") == 200
        for server in pair:
            assert ask_to(server, "update_weights_from_disk", {"model_path": str(path)}) == 200

    check_weights(variant, pair, model, tmp_path, "released", renew)


@on("sleeping")
@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_its_weights_change(variant, level, pair, model, tmp_path):
    """At level 2 the server forgets its weights. So it gets them before its KV cache is back."""

    def renew(path):
        for server in pair:
            assert ask_to(server, f"sleep?level={level}") == 200
            assert ask_to(server, "wake_up?tags=weights") == 200
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            assert ask_to(server, "collective_rpc", reload) == 200
            assert ask_to(server, "wake_up?tags=kv_cache") == 200
            assert ask_to(server, "reset_prefix_cache") == 200

    check_weights(variant, pair, model, tmp_path, f"slept at level {level}", renew)


def check_weights(variant, pair, model, folder, what, renew):
    """`renew` gives both servers the weights at a path: other ones, then the model's again."""
    found, other = {}, changed_weights(Path(model.path), folder)
    for name, path in (("new weights", other), ("old weights", Path(model.path))):
        renew(path)
        samples = asyncio.run(answers(pair[0], model))
        found[name] = asyncio.run(compared(samples, pair[1], tolerance(variant)))
    report(variant, what, found)
    assert not any(result["wrong"] for result in found.values()), found
    assert not pair[0].trouble()


@on("batch-invariant")
def test_bits_of_a_request_do_not_depend_on_the_batch(variant, pair, model):
    """Every log-probability of a request alone, in its batch, and in the batch turned round."""
    prompts = [asked.prompt for asked in requests(model.ids, 13)]

    async def answers():
        async with client_of(pair[0]) as client:
            for batch in (*([prompt] for prompt in prompts), prompts, prompts[::-1]):
                found.extend(
                    zip(batch, await client.batch(batch, 48, likeliest=LIKELIEST), strict=True)
                )

    found = []
    asyncio.run(answers())
    alone = dict(found[: len(prompts)])
    differing = sum(answer != alone[prompt] for prompt, answer in found)
    report(variant, "bits", {"answers": len(found), "differing": differing})
    assert not differing


@on()
def test_trees_were_decoded(variant, pair):
    """Every step that shares KV went through tree attention, on every rank, and read less KV.

    A server that checks others' answers decodes many requests alone. So does the decode server of
    a pair, which gets them one by one.
    """
    for state in reported_states(variant, FLEET.variants[variant], pair[0]):
        assert state["steps_tree"] > 100
        assert state["kv_bytes_read"] < 0.6 * state["kv_bytes_query_guided"]
        assert set(state["steps_host"]) <= {TOO_FEW, *WITHOUT_GRAPH}
        alone = {other.against for other in FLEET.variants.values()} | {"disaggregated"}
        if variant not in alone:
            assert state["steps_host"].get(TOO_FEW, 0) < 0.2 * state["steps_tree"]


@on("chunks", "chunks-lookup", "mixed", "mixed-in-graphs")
def test_mixed_steps_went_through_tree_attention(variant, pair):
    """The report has the steps by what they contain."""
    steps = pair[0].state()["steps"]
    report(variant, "steps", {f"{row['kind']}: {row['reason']}": row["steps"] for row in steps})
    assert any(row["kind"] == "mixed" and row["reason"] is None for row in steps)

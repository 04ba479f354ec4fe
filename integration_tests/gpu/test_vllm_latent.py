"""On a Hopper GPU: with an MLA model, vLLM's tokens are those of its own backend, and a control's.

vLLM's MLA differs from itself with how it cuts prompts into prefills (docs/kernel-log.md). So every
server computes the prompts one by one before the answers, and a server of vLLM's own gives answers
that are checked alike.
"""

import asyncio
import json
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks.e2e.checked_answers import TOLERANCE, check
from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.server import Server
from integration_tests.gpu.checked_variants import client_of, report
from integration_tests.gpu.forest_traffic import answered, requests
from integration_tests.gpu.variants import Fleet, Variant, running
from integration_tests.gpu.vllm_variants import COMMON

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

SHAPES = ("latent-16", "latent-8")
"""The heads of DeepSeek-V2-Lite or of a rank of V3, and those of a rank of Kimi K2."""

CONTROL = "control"
MORE = 0.002  # share of tokens that may be wrong in addition to the control's share


def fleet(shape, flags, settings):
    """The server that checks all answers takes no flags: it does not speculate."""
    # The prompts are short: take every batch that shares something.
    ours = {"DEFT_MLA": "1", "DEFT_MIN_SAVED_MS": "0"}
    hosts = {
        "host": Variant("FLASH_ATTN_MLA", (), settings),
        CONTROL: Variant("FLASH_ATTN_MLA", flags, settings),
    }
    return Fleet("vllm", COMMON, hosts, {shape: Variant("deft", flags, {**ours, **settings})})


async def judged(servers, server, theirs, model):
    """The answers to two rounds of a forest, checked by the host's server one by one."""
    samples = []
    async with client_of(servers, server) as client:
        for seed in range(2):
            asked = requests(model.ids, seed)
            for each in asked:
                await client.batch([each.prompt], 1)
            samples += await answered(client, asked)
    async with client_of(servers, theirs) as client:
        for prompt, _ in samples:
            await client.batch([prompt], 1)
        limit = TOLERANCE["bfloat16"]
        return (await check(samples, client, limit, at_once=1)).to_dict(limit)


def checked(shape, folder, flags=(), settings=MappingProxyType({})):
    """The state of a server after two rounds of a forest whose requests join, end and hang up."""
    servers = fleet(shape, flags, settings)
    names = [shape, CONTROL, "host"]
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(servers, names, 1, model, Path(), folder) as started:
        for server in started.values():
            if isinstance(server, StartError):
                raise server
            assert isinstance(server, Server)
        ours = started[shape]
        found = {}
        for name in (shape, CONTROL):
            found[name] = asyncio.run(judged(servers, started[name], started["host"], model))
            report(shape, name, found[name])
        state = ours.state()
        report(shape, "steps", {
            name: state[name] for name in
            ("steps_tree", "steps_host", "plans", "kv_bytes_read", "kv_bytes_query_guided",
             "verified_tokens", "accepted_tokens")
        })  # fmt: skip
        wrong = {name: each["wrong"] / each["tokens"] for name, each in found.items()}
        assert found[shape]["tokens"] > 2000
        assert wrong[shape] <= wrong[CONTROL] + MORE, found
        assert not ours.trouble()
        assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]
        return state


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_is_the_hosts(shape, tmp_path):
    state = checked(shape, tmp_path)
    assert state["steps_tree"] > 50
    # Requests that share nothing replay the host's graphs.
    assert any("shares" in reason for reason in state["steps_host"]), state["steps_host"]


def test_chains_of_drafts(tmp_path):
    """Four query tokens of eight heads fill half of a tile. A layer of the model drafts (MTP).

    Only tokens behind an accepted draft depend on more than the first query token of a request.
    """
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    flags = ("--speculative-config", json.dumps(drafts))
    # vLLM chooses runner V1 for DeepSeek-V3 by itself.
    state = checked("latent-8-drafting", tmp_path, flags, {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert state["steps_tree"] > 20
    assert state["verified_tokens"] > 0
    assert state["accepted_tokens"] > 100

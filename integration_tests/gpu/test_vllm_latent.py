"""On a Hopper GPU: with an MLA model, vLLM's tokens are those of its own backend, and a control's.

vLLM's MLA differs from itself with how it cuts prompts into prefills (docs/kernel-log.md). So every
server computes the prompts one by one before the answers, and a server of vLLM's own gives answers
that are checked alike.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks.e2e.answers import TOLERANCE, check
from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.plugins import ANY_SHARING, plugin_settings
from integration_tests.common.server import Server
from integration_tests.gpu.checked_variants import client_of, report, reported_states
from integration_tests.gpu.forest_traffic import answered, requests
from integration_tests.gpu.variants import LATENT_SERVERS, Fleet, Variant, running
from integration_tests.gpu.vllm_variants import COMMON, VARIANTS

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

CONTROL = "control"
MORE = 0.002  # share of tokens that may be wrong in addition to the control's share


def fleet(name, ranks, flags, settings, folder):
    """All servers have as many ranks, so that only attention differs.

    The server that checks all answers takes no flags: it does not speculate.
    """
    of = replace(VARIANTS["two-ranks"] if ranks == 2 else Variant("deft"), against="host")
    host = replace(of, backend="FLASH_ATTN_MLA", settings={**of.settings, **settings})
    control = replace(host, flags=(*of.flags, *flags))
    asked = {"DEFT_MLA": "1", **plugin_settings(folder / "plugins", ANY_SHARING)}
    ours = replace(control, backend="deft", settings={**host.settings, **asked})
    return Fleet("vllm", COMMON, {"host": host, CONTROL: control}, {name: ours})


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


def checked(shape, ranks, folder, flags=(), settings=MappingProxyType({})):
    """The states of a server's ranks after two rounds of a forest whose requests join, end and
    hang up."""
    if ranks > num_gpus():
        pytest.skip(f"these servers need {ranks} GPUs")
    name = f"{shape}-{ranks}"
    servers = fleet(name, ranks, flags, settings, folder)
    names = [name, CONTROL, "host"]
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(servers, names, num_gpus(), model, Path(), folder) as started:
        for server in started.values():
            if isinstance(server, StartError):
                raise server
            assert isinstance(server, Server)
        ours = started[name]
        found = {}
        for each in (name, CONTROL):
            found[each] = asyncio.run(judged(servers, started[each], started["host"], model))
            report(name, each, found[each])
        states = reported_states(name, servers.variants[name], ours)
        wrong = {each: result["wrong"] / result["tokens"] for each, result in found.items()}
        assert found[name]["tokens"] > 2000
        assert wrong[name] <= wrong[CONTROL] + MORE, found
        assert not ours.trouble()
        for state in states:
            assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]
        return states


@pytest.mark.parametrize(("shape", "ranks"), LATENT_SERVERS)
def test_every_token_is_the_hosts(shape, ranks, tmp_path):
    for state in checked(shape, ranks, tmp_path):
        assert state["steps_tree"] > 50
        # Requests that share nothing replay the host's graphs.
        assert any("shares" in reason for reason in state["steps_host"]), state["steps_host"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_chains_of_drafts(ranks, tmp_path):
    """Four query tokens of eight heads fill half of a tile. A layer of the model drafts (MTP).

    Only tokens behind an accepted draft depend on more than the first query token of a request.
    """
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    flags = ("--speculative-config", json.dumps(drafts))
    # vLLM chooses runner V1 for DeepSeek-V3 by itself.
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    states = checked("latent-8-drafting", ranks, tmp_path, flags, runner)
    for state in states:
        assert state["steps_tree"] > 20
        assert state["verified_tokens"] > 0
    assert states[0]["accepted_tokens"] > 100

"""On a Hopper GPU: with an MLA model, every token is that of the host's own backend.

vLLM's MLA differs from itself with how it cuts prompts into prefills (docs/kernel-log.md). So its
servers compute the prompts one by one before the answers, and a control, a server of vLLM's own,
gives answers that are checked alike.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks.e2e.answers import TOLERANCE
from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.gpu.checked_variants import answers, compared, report, reported_states
from integration_tests.gpu.variants import FLEET, LATENT_SERVERS, Fleet, Variant, running

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

SGLANG = FLEET.host == "sglang"
BACKEND = "fa3" if SGLANG else "FLASH_ATTN_MLA"
CONTROL = "control"
DRAFTING = LATENT_SERVERS[2:] if SGLANG else (("latent-8-drafting", 1), ("latent-8-drafting", 2))
MORE = 0.0 if SGLANG else 0.002  # share of tokens that may be wrong beyond the control's share


def fleet(name, ranks, flags, settings):
    """All servers have as many ranks, so that only attention differs.

    The server that checks all answers takes no flags: it does not speculate.
    """
    of = FLEET.variants["two-ranks"] if ranks == 2 else Variant("deft")
    host = replace(of, backend=BACKEND, settings={**of.settings, **settings}, against="host")
    control = replace(host, flags=f"{of.flags} {flags}")
    asked = {**host.settings, "DEFT_MLA": "1"}
    ours = replace(control, backend="deft", settings=asked, any_sharing=True)
    references = {"host": host} if SGLANG else {"host": host, CONTROL: control}
    return Fleet(FLEET.host, FLEET.common, references, {name: ours})


def checked(name, shape, ranks, folder, flags="", settings=MappingProxyType({})):
    """The states of a server's ranks after two rounds of a forest whose requests join, end and
    hang up."""
    if ranks > num_gpus():
        pytest.skip(f"these servers need {ranks} GPUs")
    servers = fleet(name, ranks, flags, settings)
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(servers, list(servers.servers), num_gpus(), model, Path(), folder) as started:
        for server in started.values():
            if isinstance(server, StartError):
                raise server
        found = {}
        for each in started.keys() - {"host"}:
            samples = asyncio.run(answers(started[each], model, alone=not SGLANG))
            judged = compared(samples, started["host"], TOLERANCE["bfloat16"], alone=not SGLANG)
            found[each] = asyncio.run(judged)
            report(name, each, found[each])
        states = reported_states(name, servers.variants[name], started[name])
        wrong = {each: result["wrong"] / result["tokens"] for each, result in found.items()}
        assert found[name]["tokens"] > 2000
        assert not SGLANG or found[name]["ties"] < 0.1 * found[name]["tokens"]
        assert wrong[name] <= wrong.get(CONTROL, 0.0) + MORE, found
        assert not started[name].trouble()
        for state in states:
            assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]
        return states


@pytest.mark.parametrize(("shape", "ranks"), LATENT_SERVERS)
def test_every_token_is_the_hosts(shape, ranks, tmp_path):
    for state in checked(f"{shape}-{ranks}", shape, ranks, tmp_path):
        assert state["steps_tree"] > 50
        # Requests that share nothing replay the host's graphs.
        assert SGLANG or any("shares" in reason for reason in state["steps_host"])


@pytest.mark.parametrize(("shape", "ranks"), DRAFTING)
def test_chains_of_drafts(shape, ranks, tmp_path):
    """Four query tokens of eight heads fill half of a tile. SGLang's model drafts for itself; in
    vLLM, a layer of the model drafts (MTP).

    Only tokens behind an accepted draft depend on more than the first query token of a request.
    """
    name, settings = f"{shape}-{ranks}-chains", {}
    if SGLANG:
        flags = (
            "--speculative-algorithm STANDALONE --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
            f"--speculative-draft-model-path {tmp_path / 'model'}"
        )
    else:
        drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
        flags = f"--speculative-config '{drafts}'"
        # vLLM chooses runner V1 for DeepSeek-V3 by itself.
        settings = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    states = checked(name, shape, ranks, tmp_path, flags, settings)
    for state in states:
        assert state["steps_tree"] > 20
        assert state["verified_tokens"] > 0

"""On GPUs: every token of every variant of vLLM equals the host's own, or is a tie.

Servers run with asynchronous scheduling and CUDA graphs. If the environment names a folder in
``GPU_REPORT``, the comparisons are written there.
"""

import asyncio
from pathlib import Path

import pytest

from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.control import ask_to, changed_weights
from integration_tests.gpu.checked_variants import (
    check_adapters,
    check_every_token,
    check_steps,
    checked,
    report,
    tolerance,
)
from integration_tests.gpu.vllm_variants import FLEET, VARIANTS

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

on_each = pytest.mark.parametrize("variant", VARIANTS, indirect=True)


@on_each
def test_every_token_is_vllms(variant, pair, model):
    check_every_token(FLEET, variant, pair, model)


@pytest.mark.parametrize("variant", ["lora"], indirect=True)
def test_adapters_beside_their_base(variant, pair, model):
    check_adapters(FLEET, variant, pair, model)


@pytest.mark.parametrize("variant", ["sleeping"], indirect=True)
@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_its_weights_change(variant, level, pair, model, tmp_path):
    """As an RL trainer does after each step: sleep, wake, new weights, samples.

    At level 2 the server forgets its weights. So it gets them before its KV cache is back.
    """
    other = changed_weights(Path(model.path), tmp_path)
    found = {}
    for name, path in (("new weights", other), ("old weights", Path(model.path))):
        for server in pair:
            assert ask_to(server, f"sleep?level={level}") == 200
            assert ask_to(server, "wake_up?tags=weights") == 200
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            assert ask_to(server, "collective_rpc", reload) == 200
            assert ask_to(server, "wake_up?tags=kv_cache") == 200
            assert ask_to(server, "reset_prefix_cache") == 200
        found[name] = asyncio.run(checked(FLEET, pair, model, None, tolerance(variant)))
    report(variant, f"slept at level {level}", found)
    assert not any(result["wrong"] for result in found.values()), found
    assert not pair[0].trouble()


@on_each
def test_vllm_decoded_trees(variant, pair):
    check_steps(FLEET, variant, pair[0])


@pytest.mark.parametrize("variant", ["chunks", "chunks-lookup"], indirect=True)
def test_mixed_steps_went_through_tree_attention(variant, pair):
    """The report has the steps by what they contain."""
    steps = pair[0].state()["steps"]
    report(variant, "steps", {f"{row['kind']}: {row['reason']}": row["steps"] for row in steps})
    assert any(row["kind"] == "mixed" and row["reason"] is None for row in steps)

"""On a Hopper GPU: with an MLA model, every token is that of the host's own backend."""

from pathlib import Path

import pytest

from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.server import Server
from integration_tests.gpu.checked_variants import check_every_token, report
from integration_tests.gpu.sglang_variants import COMMON
from integration_tests.gpu.variants import Fleet, Variant, running

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")

SHAPES = ("latent-16", "latent-8")
"""The heads of DeepSeek-V2-Lite or of a rank of V3, and those of a rank of Kimi K2."""

# The prompts are short: take every batch that shares something.
OURS = Variant("deft", settings={"DEFT_MLA": "1", "DEFT_MIN_SAVED_MS": "0"})
FLEET = Fleet("sglang", COMMON, {"host": Variant("fa3")}, dict.fromkeys(SHAPES, OURS))


@pytest.fixture(scope="module", params=SHAPES)
def served(request, tmp_path_factory):
    """A shape, a server with tree attention and the host's own, and their model."""
    shape = request.param
    folder = tmp_path_factory.mktemp(shape)
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(FLEET, [shape, "host"], 1, model, Path(), folder) as found:
        for server in found.values():
            if isinstance(server, StartError):
                raise server
        ours, theirs = found[shape], found["host"]
        assert isinstance(ours, Server)
        assert isinstance(theirs, Server)
        yield shape, (ours, theirs), model


def test_every_token_is_the_hosts(served):
    """Two rounds of a forest whose requests join, end and hang up."""
    shape, pair, model = served
    check_every_token(FLEET, shape, pair, model)
    state = pair[0].state()
    report(shape, "steps", {
        name: state[name]
        for name in ("steps_tree", "steps_host", "plans", "kv_bytes_read", "kv_bytes_query_guided")
    })  # fmt: skip
    assert state["steps_tree"] > 50
    assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]

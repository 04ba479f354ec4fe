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


def checked(shape, folder, *flags, fewest):
    """The state of a server after two rounds of a forest whose requests join, end and hang up.

    At least `fewest` steps went through tree attention.
    """
    # The prompts are short: take every batch that shares something.
    ours = Variant("deft", flags, {"DEFT_MLA": "1", "DEFT_MIN_SAVED_MS": "0"})
    fleet = Fleet("sglang", COMMON, {"host": Variant("fa3")}, {shape: ours})
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(fleet, [shape, "host"], 1, model, Path(), folder) as found:
        for server in found.values():
            if isinstance(server, StartError):
                raise server
        ours, theirs = found[shape], found["host"]
        assert isinstance(ours, Server)
        assert isinstance(theirs, Server)
        check_every_token(fleet, shape, (ours, theirs), model)
        state = ours.state()
        report(shape, "steps", {
            name: state[name] for name in
            ("steps_tree", "steps_host", "plans", "kv_bytes_read", "kv_bytes_query_guided")
        })  # fmt: skip
        assert state["steps_tree"] > fewest
        assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]
        return state


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_is_the_hosts(shape, tmp_path):
    checked(shape, tmp_path, fewest=50)


def test_chains_of_drafts(tmp_path):
    """Four query tokens of eight heads fill half of a tile. The model drafts for itself."""
    chains = (
        "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", str(tmp_path / "model"), "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    )  # fmt: skip
    state = checked("latent-8", tmp_path, *chains, fewest=20)
    assert state["verified_tokens"] > 0

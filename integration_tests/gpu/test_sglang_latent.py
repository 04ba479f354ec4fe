"""On a Hopper GPU: with an MLA model, every token is that of the host's own backend."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.common.plugins import ANY_SHARING, plugin_settings
from integration_tests.common.server import Server
from integration_tests.gpu.checked_variants import check_every_token, reported_states
from integration_tests.gpu.sglang_variants import COMMON, VARIANTS
from integration_tests.gpu.variants import LATENT_SERVERS, Fleet, Variant, running

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these servers run on a GPU")


def checked(name, shape, ranks, folder, *flags, fewest):
    """The states of a server's ranks after two rounds of a forest whose requests join, end and
    hang up.

    The host's server has as many ranks, so that only attention differs. At least `fewest` steps
    went through tree attention.
    """
    if ranks > num_gpus():
        pytest.skip(f"this server needs {ranks} GPUs")
    of = replace(VARIANTS["two-ranks"] if ranks == 2 else Variant("deft"), against="host")
    settings = {"DEFT_MLA": "1", **plugin_settings(folder / "plugins", ANY_SHARING)}
    ours = replace(of, flags=(*of.flags, *flags), settings=settings)
    host = replace(of, backend="fa3", settings={})
    fleet = Fleet("sglang", COMMON, {"host": host}, {name: ours})
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(fleet, [name, "host"], num_gpus(), model, Path(), folder) as found:
        for server in found.values():
            if isinstance(server, StartError):
                raise server
        pair = found[name], found["host"]
        assert all(isinstance(server, Server) for server in pair)
        check_every_token(fleet, name, pair, model)
        states = reported_states(name, ours, pair[0])
        for state in states:
            assert state["steps_tree"] > fewest
            assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]
        return states


@pytest.mark.parametrize(("shape", "ranks"), LATENT_SERVERS)
def test_every_token_is_the_hosts(shape, ranks, tmp_path):
    checked(f"{shape}-{ranks}", shape, ranks, tmp_path, fewest=50)


@pytest.mark.parametrize(("shape", "ranks"), LATENT_SERVERS[1:])
def test_chains_of_drafts(shape, ranks, tmp_path):
    """Four query tokens of eight heads fill half of a tile. The model drafts for itself."""
    chains = (
        "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", str(tmp_path / "model"), "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    )  # fmt: skip
    states = checked(f"{shape}-{ranks}-chains", shape, ranks, tmp_path, *chains, fewest=20)
    assert all(state["verified_tokens"] > 0 for state in states)

"""Servers of MLA models on a Hopper GPU, and what the tests of both hosts check of them."""

from contextlib import contextmanager
from pathlib import Path

from benchmarks.e2e.served_model import write_model
from deft_backend.tools.servers.command import StartError
from integration_tests.common.server import Server
from integration_tests.gpu.checked_variants import check_every_token, report
from integration_tests.gpu.variants import Fleet, Variant, running

SHAPES = ("latent-16", "latent-8")
"""The heads of DeepSeek-V2-Lite or of a rank of V3, and those of a rank of Kimi K2."""


def fleet(host, common, backend, flags=()):
    """A host's servers; `backend` is its own for MLA. The others have these further `flags`."""
    # The prompts are short: take every batch that shares something.
    ours = Variant("deft", flags, {"DEFT_MLA": "1", "DEFT_MIN_SAVED_MS": "0"})
    return Fleet(host, common, {"host": Variant(backend)}, dict.fromkeys(SHAPES, ours))


@contextmanager
def served(servers, shape, folder):
    """A server with tree attention and the host's own, and their model, for a `with` block."""
    model = write_model(folder / "model", shape, "random", "bfloat16")
    with running(servers, [shape, "host"], 1, model, Path(), folder) as found:
        for server in found.values():
            if isinstance(server, StartError):
                raise server
        ours, theirs = found[shape], found["host"]
        assert isinstance(ours, Server)
        assert isinstance(theirs, Server)
        yield (ours, theirs), model


def check(servers, shape, pair, model, fewest=50):
    """Two rounds of a forest whose requests join, end and hang up: every token is the host's.

    At least `fewest` steps go through tree attention.
    """
    check_every_token(servers, shape, pair, model)
    state = pair[0].state()
    report(shape, "steps", {
        name: state[name]
        for name in ("steps_tree", "steps_host", "plans", "kv_bytes_read", "kv_bytes_query_guided")
    })  # fmt: skip
    assert state["steps_tree"] > fewest
    assert state["kv_bytes_read"] < 0.8 * state["kv_bytes_query_guided"]

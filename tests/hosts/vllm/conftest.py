"""Each test is a server of its own: an empty state folder, no earlier server, no earlier log."""

from importlib.util import find_spec

import pytest

from deft_backend.hosts.common.latches import OnceLog
from failure_lines import failures  # noqa: F401

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(autouse=True)
def new_server(monkeypatch, tmp_path, failures):  # noqa: F811
    from vllm.v1.attention.backends import utils

    from deft_backend.hosts.vllm import factory, registered, server

    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(server, "_current", None)
    monkeypatch.setattr(server, "untold", lambda config: "no worker runs")
    monkeypatch.setattr(factory, "log", OnceLog())
    monkeypatch.setattr(registered, "log", OnceLog())
    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: "NHD", raising=False)  # to 0.28


@pytest.fixture
def rests(monkeypatch):
    """Query tokens of every call of the host's implementation, for a step's rest or all of it."""
    from vllm_cpu_backend import PlainCpuImplementation

    tokens, forward = [], PlainCpuImplementation.forward

    def recorded(self, layer, query, key, value, *args):
        assert key is value is None or len(query) == len(key) == len(value)
        tokens.append(len(query))
        return forward(self, layer, query, key, value, *args)

    monkeypatch.setattr(PlainCpuImplementation, "forward", recorded)
    return tokens


@pytest.fixture(params=["auto", "deft-node"])
def policy(request, monkeypatch):
    """Two policies whose plans differ."""
    monkeypatch.setenv("DEFT_POLICY", request.param)
    return request.param


@pytest.fixture(params=["decode", "verification", "mixed", "picked"])
def kind(request, monkeypatch):
    """A kind of steps, in a server that has them."""
    from vllm_fakes import KINDS

    found = KINDS[request.param]
    if found.invariant:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    return found

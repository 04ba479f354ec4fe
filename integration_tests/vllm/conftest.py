"""Servers that the tests share: the host's own backend all the time, ours one after another."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:  # this environment holds the other host
    collect_ignore_glob = ["test_*.py"]
else:
    from integration_tests.common.adapter import write_adapter
    from integration_tests.common.fixtures import model, model_exists, servers_end_with_the_tests  # noqa: F401
    from integration_tests.common.server import MODEL, Reference
    from integration_tests.vllm.vllm_server import GROUPS, running


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """A LoRA adapter with random weights."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, MODEL)
    return folder


@pytest.fixture(scope="session")
def baseline(tmp_path_factory, adapter):
    """The host's own backend."""
    folder = tmp_path_factory.mktemp("baseline")
    with running(None, GROUPS["default"], folder, adapter) as server:
        yield server


@pytest.fixture(scope="session")
def reference(baseline):
    return Reference(baseline)


@pytest.fixture(scope="session")
def server(request, tmp_path_factory, adapter):
    """A server with the plugin, under the flags of the test's group."""
    folder = tmp_path_factory.mktemp(request.param)
    with running("deft", GROUPS[request.param], folder, adapter) as server:
        yield server

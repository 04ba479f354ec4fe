"""Servers that the tests share: the baseline from its first use on, the others one by one."""

import pytest

from deft_backend.tools.servers.command import HOSTS, installed_hosts
from integration_tests.common.adapter import write_adapter
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL
from integration_tests.hosts import GROUPS, HOST, running
from integration_tests.hosts.cpu_speculation import unusable

collect_ignore_glob = [f"test_{host}_*" for host in HOSTS if host != HOST]
if not installed_hosts():
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def model():
    """The right answers of servers on the CPU, in float32; no server is needed for them."""
    return PlainModel(MODEL)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """A LoRA adapter with random weights."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, MODEL)
    return folder


@pytest.fixture(scope="session")
def baseline(tmp_path_factory, adapter):
    """The host's own backend."""
    with running(None, GROUPS["default"], tmp_path_factory.mktemp("baseline"), adapter) as server:
        yield server


@pytest.fixture(scope="session")
def server(request, tmp_path_factory, adapter):
    """A server with the plugin, under the flags of the test's group."""
    group = GROUPS[request.param]
    reason = unusable() if group.cpu_speculation else None
    if reason is not None:
        pytest.skip(reason)
    with running("deft", group, tmp_path_factory.mktemp(request.param), adapter) as server:
        server.group = request.param
        yield server

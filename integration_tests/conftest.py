"""Servers that the tests share: the baseline from its first use on, the others one by one."""

import pytest

pytest.importorskip("sglang", reason="the integration tests start real SGLang servers")

from integration_tests.common.fixtures import model, model_exists, servers_end_with_the_tests  # noqa: F401
from integration_tests.cpu_speculation import unusable
from integration_tests.sglang_server import GROUPS, Group, running


@pytest.fixture(scope="session")
def baseline(tmp_path_factory):
    """The host's own backend."""
    with running(None, Group(), tmp_path_factory.mktemp("baseline")) as server:
        yield server


@pytest.fixture(scope="session")
def server(request, tmp_path_factory):
    """A server with the plugin, under the flags of the test's group."""
    group = GROUPS[request.param]
    reason = unusable() if group.cpu_speculation else None
    if reason is not None:
        pytest.skip(reason)
    with running("deft", group, tmp_path_factory.mktemp(request.param)) as server:
        yield server

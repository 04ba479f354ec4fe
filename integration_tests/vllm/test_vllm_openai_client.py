"""The `openai` package gets the host's own answers while vLLM evicts, pauses and flushes."""

import time

import pytest

from integration_tests.common.answers import on
from integration_tests.common.control import ask_to
from integration_tests.common.openai_traffic import Round, check_openai_client
from integration_tests.vllm.vllm_server import GROUPS, running


@pytest.fixture(scope="module")
def own(tmp_path_factory, adapter):
    """The host's own backend with the flags of the test's group, which change the precision."""
    folder = tmp_path_factory.mktemp("own")
    with running(None, GROUPS["rollouts"], folder, adapter) as server:
        yield server


@pytest.mark.rare
@on("rollouts")
def test_the_openai_package_with_evictions_pauses_and_flushes(server, own):
    """Each mode of ``pause``; the last one aborts every request in flight."""

    def pause(mode, flush):
        assert ask_to(server, f"pause?mode={mode}") == 200
        assert ask_to(server, f"reset_prefix_cache{flush}") == 200
        time.sleep(0.2)
        assert ask_to(server, "resume") == 200

    rounds = [
        Round(lambda: pause("keep", "?reset_running_requests=true")),
        Round(lambda: pause("wait", "")),
        Round(lambda: pause("abort", ""), aborts=True),
    ]
    before = evicted(server)
    whole = check_openai_client(
        server, own, rounds, lambda: bool(server.post("reset_prefix_cache", {})["success"])
    )
    assert whole >= 80  # all choices of the two rounds that abort nothing
    assert evicted(server) > before


def evicted(server):
    """Blocks that the host evicted from its prefix cache, by its own count."""
    return sum(server.metrics("vllm:kv_block_lifetime_seconds_count").values())

"""The `openai` package gets the host's own answers while SGLang evicts, pauses and flushes."""

import time

import pytest

from integration_tests.common.answers import on
from integration_tests.common.control import ask_to
from integration_tests.common.openai_traffic import Round, check_openai_client


@pytest.mark.rare
@on("small-cache")
def test_the_openai_package_with_evictions_pauses_and_flushes(server, baseline):
    """Each mode of ``pause_generation``; the last one aborts every request in flight."""

    def pause(mode):
        assert ask_to(server, "pause_generation", {"mode": mode}) == 200
        ask_to(server, "flush_cache")  # the host refuses where requests wait
        time.sleep(0.2)
        assert ask_to(server, "continue_generation") == 200

    rounds = [
        Round(lambda: pause("in_place")),
        Round(lambda: pause("retract")),
        Round(lambda: pause("abort"), aborts=True),
    ]
    before = evicted(server)
    whole = check_openai_client(
        server, baseline, rounds, lambda: ask_to(server, "flush_cache") == 200
    )
    assert whole >= 80  # all choices of the two rounds that abort nothing
    assert evicted(server) > before


def evicted(server):
    """Tokens that the host evicted from its prefix cache, by its own count."""
    return sum(server.metrics("sglang:evicted_tokens_total").values())

"""The `openai` package gets the host's own answers while a server evicts, pauses and flushes."""

import time

import pytest

from integration_tests.common.answers import on
from integration_tests.common.openai_traffic import Round, check_openai_client


@pytest.mark.rare
@on("small-cache")
def test_the_openai_package_with_evictions_pauses_and_flushes(server, baseline):
    """Each mode of a pause; the last one aborts every request in flight."""

    def pause(mode):
        server.pause(mode)
        server.flush_while_decoding()
        time.sleep(0.2)
        server.resume()

    rounds = [Round(lambda mode=mode: pause(mode)) for mode in server.PAUSES]
    rounds.append(Round(lambda: pause("abort"), aborts=True))
    before = server.evicted()
    whole = check_openai_client(server, baseline, rounds)
    assert whole >= 80  # all choices of the two rounds that abort nothing
    assert server.evicted() > before

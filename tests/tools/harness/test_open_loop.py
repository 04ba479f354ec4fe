"""The open loop: times of tokens as the server sent them, and the search for goodput."""

import asyncio
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.client import ServerClient
from deft_backend.tools.harness.open_loop import GoodputSearch, Seen, Spread
from deft_backend.tools.harness.workload import Outcome, Replayed, Request, Workload, replay
from fake_completions import Fake, serving


def test_the_times_are_those_at_which_the_server_sent():
    """One request fails; pieces of two tokens are one gap, however busy the machine is."""
    requests = tuple(Request(f"r{at}", f"prompt {at}", 12, at=0.05 * at) for at in range(8))

    async def send():
        async with ServerClient(fake.url) as client:
            client.model = "made-up"
            return await replay(Workload("w", "", (), requests), client)

    with serving(Fake(token_seconds=0.04, piece_tokens=2, faults={"prompt 5": 503})) as fake:
        seen = Seen.of(asyncio.run(send()))
    gaps = [later - earlier for times in fake.sent for earlier, later in pairwise(times)]
    assert (len(seen.firsts), seen.tokens, len(gaps)) == (7, 7 * 12, 7 * 5)
    found, sent = Spread.of(seen.gaps), Spread.of(gaps)
    assert found is not None
    assert sent is not None
    assert found.p50 > 38.0
    assert found.p50 == pytest.approx(sent.p50, rel=0.25)
    assert found.mean == pytest.approx(sent.mean, rel=0.25)
    assert min(seen.firsts) > 0.04
    # Per token, a piece counts twice: 10 tokens after the first in 5 gaps and no time.
    assert statistics.fmean(seen.per_token) == pytest.approx(found.mean / 1e3 * 5 / 11, rel=0.05)
    assert seen.failures[0].startswith("r5: failed: 503")
    assert seen.p99_ms is None
    whole = Seen.together([seen, seen])
    assert (whole.tokens, len(whole.gaps)) == (2 * seen.tokens, 2 * len(seen.gaps))
    assert whole.to_json()["itl_ms"] == seen.to_json()["itl_ms"] == found._asdict()


@pytest.mark.parametrize(("slow", "p99"), [(2, 10.0), (3, 500.0)])
def test_the_last_percentile_is_of_all_gaps(slow, p99):
    gaps = [0.01] * (200 - slow) + [0.5] * slow
    arrivals = [sum(gaps[:at]) for at in range(201)]
    answered = Outcome("r", 0.0, 0.0, "answered", "", 201, Answer(arrivals=arrivals))
    assert Seen.of(Replayed((answered,), 2.5)).p99_ms == pytest.approx(p99)
    assert Seen.of(Replayed((), 0.0)).p99_ms is None


def test_the_record_of_what_a_client_saw():
    seen = Seen([0.1, 0.3], [0.0123456], [0.02, 0.04], 7, 1.23456, [*"abcd"])
    spread = {"mean": 200.0, "p50": 100.0, "p95": 300.0, "p99": 300.0}
    assert seen.to_json() == {
        "duration_s": 1.235,
        "ttft_ms": spread,
        "itl_ms": dict.fromkeys(spread, 12.346),
        "tpot_ms": 30.0,
        "output_tokens_per_s": 5.7,
        "failures": 4,
        "first_failures": ["a", "b", "c"],
    }
    none = Seen([], [], [], 0, 0.0, [])
    assert Seen.together([seen, none]) == Seen.together([none, seen]) == seen
    empty = {"duration_s": 0.0, "failures": 0, "first_failures": []}
    assert none.to_json() == dict.fromkeys(seen.to_json()) | empty


def search(start, holds):
    rates = GoodputSearch(start, 50.0)
    while (rate := rates.next_rate()) is not None:
        rates.tell(rate, 49.9 if rate <= holds else 50.0)
    return rates.found()


@given(st.floats(0.1, 1000.0), st.floats(1 / 250, 250.0))
def test_the_search_ends_close_below_the_limit(start, factor):
    found = search(start, start * factor)
    assert found.reached
    assert found.rate <= start * factor < 1.1001 * found.rate
    assert len(found.trials) <= 14


def test_the_search_ends_without_a_limit():
    assert str(search(1.0, 1e9)) == "at least 256/s"
    nothing = search(1.0, 0.0)
    assert (nothing.rate, nothing.reached, str(nothing)) == (0.0, True, "0/s")
    rates = GoodputSearch(8.0, 50.0)
    rates.tell(8.0, None)  # a request failed
    assert rates.next_rate() == 4.0

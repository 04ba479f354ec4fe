"""The open loop: times of tokens as the server sent them, and the search for goodput."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.open_loop import Figures, GoodputSearch, Spread
from deft_backend.tools.harness.workload import Outcome, Replayed, Request, Workload
from fake_completions import Fake, replayed, serving


def test_the_times_are_those_at_which_the_server_sent():
    """One request fails; pieces of two tokens are one gap, however busy the machine is."""
    requests = tuple(Request(f"r{at}", f"prompt {at}", 12, at=0.05 * at) for at in range(8))
    with serving(Fake(token_seconds=0.04, piece_tokens=2, faults={"prompt 5": 503})) as fake:
        run = replayed(fake, Workload("w", "", (), requests))
    seen, answers = Figures.of(run), [o.answer for o in run.outcomes if o.answer is not None]
    gaps = [later - earlier for times in fake.sent for earlier, later in pairwise(times)]
    assert (seen.answered, seen.requests, len(gaps)) == (7, 8, 7 * 5)
    assert seen.tokens_a_second == pytest.approx(7 * 12 / run.seconds)
    found, sent = seen.gap_ms, Spread.of(gaps)
    assert found.p50 > 38.0
    assert found.p50 == pytest.approx(sent.p50, rel=0.25)
    assert found.mean == pytest.approx(sent.mean, rel=0.25)
    assert min(answer.ttft for answer in answers) > 0.04
    # Per token, a piece counts twice: 10 tokens after the first in 5 gaps and no time.
    assert seen.tpot_ms is not None
    assert seen.tpot_ms.mean == pytest.approx(found.mean * 5 / 11, rel=0.05)
    assert seen.lost == {"failed": 1}
    assert seen.p99_ms is None


@pytest.mark.parametrize(("slow", "p99"), [(2, 10.0), (3, 500.0)])
def test_the_last_percentile_is_of_all_gaps(slow, p99):
    gaps = [0.01] * (200 - slow) + [0.5] * slow
    arrivals = [sum(gaps[:at]) for at in range(201)]
    answered = Outcome("r", 0.0, 0.0, "answered", "", 201, Answer(arrivals=arrivals))
    assert Figures.of(Replayed((answered,), 2.5)).p99_ms == pytest.approx(p99)
    assert Figures.of(Replayed((), 0.0)) == Figures(0, {}, None, None, None, None, None)


def test_times_are_spread_in_milliseconds():
    assert Spread.of([0.1, 0.3]) == Spread(200.0, 100.0, 300.0, 300.0)
    assert Spread.of([0.0123456]) == Spread(*[12.346] * 4)
    assert Spread.of([]) is None


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

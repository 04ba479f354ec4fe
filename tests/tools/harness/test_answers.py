"""Answers piece by piece, and the names of what else becomes of a request."""

import asyncio
import errno
import json
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from deft_backend.tools.harness import answers
from deft_backend.tools.harness.workload import Request, Workload, WorkloadError, poisson
from drawings import check_drawn


@pytest.mark.parametrize(
    ("status", "said", "name"),
    [
        *((status, "exceeds the Context", "too long") for status in (400, 413, 422)),
        (400, "no such model", "refused"),
        (404, "too long", "refused"),
        (499, "", "refused"),
        (500, "maximum", "failed"),
    ],
)
def test_statuses(status, said, name):
    found = answers._refused(status, said)
    assert (found.status, str(found)) == (name, f"{status}: {said}")


@pytest.mark.parametrize(
    ("error", "name", "said"),
    [
        (asyncio.TimeoutError(), "timed out", "no answer in time"),
        (aiohttp.ClientPayloadError("cut"), "lost", "cut"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "lost", "Connection reset by peer"),
        (aiohttp.ServerDisconnectedError(""), "lost", "ServerDisconnectedError"),
        *(
            (kind("x"), "failed", f"the stream cannot be read: {kind('x')!r}")
            for kind in (ValueError, KeyError, TypeError, IndexError, AttributeError)
        ),
    ],
)
def test_errors(error, name, said):
    found = answers._broken(error)
    assert isinstance(found, answers.NotAnswered)
    assert (found.status, str(found)) == (name, said)


def test_other_errors_are_ours():
    ours = MemoryError()
    assert answers._broken(ours) is ours
    wrapped = OSError(0, "zero")
    assert answers.reason(wrapped) == str(wrapped)


def test_the_figures_of_an_answer():
    answer = answers.Answer(ids=[1, 2, 3], tokens=["a", "b"], arrivals=[0.5, 1.0, 2.5])
    assert (len(answer), answer.ttft, answer.tpot) == (3, 0.5, 1.0)
    assert answers.Answer(tokens=["a"], arrivals=[0.5]).tpot is None
    assert answers.Answer().add({}) == 0
    answer.logprobs, answer.top = [-0.25, -1.0], [{"a": -0.25, "b": -1.5, "c": -9.0}, {"b": -1.0}]
    assert [answer.margin(at) for at in range(3)] == [1.25, 0.0, 0.0]
    assert [answers.first_difference("abc", other) for other in ("abd", "ab", "xbc")] == [
        2,
        None,
        0,
    ]


def test_streams_are_read_as_drawn(monkeypatch):
    """The file has the pieces of a stream, and then the answer, the prompt's tokens and how many
    tokens each piece brought, or why it is no answer. The clock goes on at each piece.
    """
    path, every = Path(__file__).with_name("streams.txt"), []
    for line in path.read_text().splitlines()[::2]:
        clock, told = count(10.0).__next__, []
        monkeypatch.setattr(answers.time, "perf_counter", clock)
        reader = answers.StreamReader(told.append, answers.Answer())
        try:
            for content in json.loads(line):
                reader.take(content)
            found = (*reader.end(4), told, reader.ended)
        except answers.NotAnswered as error:
            found = f"{error.status}: {error}"
        every += [line, str(found)]
    check_drawn("\n".join(every) + "\n", path)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(WorkloadError, match="expected requests a second, above 0"):
        poisson(1, rate)


def test_requests_have_names_of_their_own_and_follow_earlier_ones():
    one, two = Request("a", "p", 3), Request("b", "p", 4, after="a")
    made = Workload("w", "", ("warm",), (one, two))
    assert made.tokens == 7
    assert made.arriving(None) is made
    first, second = made.arriving(2.0).requests
    assert (first.at > 0.0, second.at) == (True, 0.0)
    renewed = made.renewed(3)
    assert renewed.warm == ("3. warm",)
    assert renewed.requests[0].prompt() == "3. p"
    assert renewed.requests[1] is two
    for wrong, said in (((one, one), "two requests are called 'a'"), ((two,), "after unknown 'a'")):
        with pytest.raises(WorkloadError, match=said):
            Workload("w", "", (), wrong)

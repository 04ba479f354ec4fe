"""Answers stay right while a server evicts, pauses, flushes, aborts, sleeps and loads weights.

The reference is the model itself, which no control request reaches.
"""

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check, on
from integration_tests.common.control import (
    ask_to,
    changed_weights,
    check_while_decoding,
    while_decoding,
)
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL
from integration_tests.vllm.vllm_server import Ask, together

pytestmark = pytest.mark.rare


def asked(opening, tokens, topics=3):
    """Requests that share a prefix and decode together."""
    return [together([Ask(PREFIX + f"{opening} {t},", tokens=tokens) for t in TOPICS[:topics]])]


@on("rollouts")
def test_evicted_documents_are_computed_again(server, model):
    """Five documents, more than the cache holds, then the first one again."""
    documents = [f"{topic} " * 20 + PREFIX[:120] for topic in TOPICS[:5]]
    for document in [*documents, documents[0]]:
        check(server, model, [together([Ask(document + end, tokens=4) for end in ("One", "Two")])])
    before, steps = hits(server), server.state()["steps_tree"]
    server.complete([Ask(documents[1], tokens=1)])
    assert hits(server) - before < 100, "the second document was not evicted"
    assert steps > 0


def hits(server):
    """Tokens that the host found in its prefix cache, by its own count."""
    return sum(server.metrics("vllm:prefix_cache_hits_total").values())


@on("rollouts")
def test_paused_requests_go_on(server, model):
    asks = asked("It paused at", 16)

    def pause():
        assert ask_to(server, "pause?mode=keep") == 200
        assert ask_to(server, "resume") == 200

    check_while_decoding(server, model, asks, pause)


@on("rollouts")
def test_the_cache_is_flushed_while_requests_decode(server, model):
    """The host preempts every request, flushes, and computes all of them again."""
    asks = asked("They flushed", 16)

    def flush():
        assert ask_to(server, "reset_prefix_cache?reset_running_requests=true") == 200

    check_while_decoding(server, model, asks, flush)
    check(server, model, asks)


@on("rollouts")
def test_every_request_is_aborted(server, model):
    """Aborts of all requests, twice; requests that come later get their answers."""
    for topic in TOPICS[:2]:
        asks = [together([Ask(PREFIX + f"Stop {topic} {i}", tokens=40) for i in range(3)])]
        found = while_decoding(server, asks, lambda: ask_to(server, "abort_requests"))
        assert all(len(choices) == 3 for choices in found)
    check(server, model, asked("Later", 8, topics=4))


@on("rollouts")
@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_wakes(server, model, level):
    """On the CPU the host keeps its memory: the engine only flushes and stops scheduling."""
    check(server, model, asked("Before it slept", 6))
    assert ask_to(server, f"sleep?level={level}") == 200
    assert ask_to(server, "wake_up") == 200
    check(server, model, asked("Before it slept", 6))


@on("rollouts")
def test_weights_change_between_rollouts(server, model, tmp_path):
    """As an RL trainer does: samples, new weights, samples, and the old weights again."""
    asks = asked("Of", 8, topics=4)
    first = check(server, model, asks)
    other = changed_weights(MODEL, tmp_path)
    load_weights(server, other)
    second = check(server, PlainModel(other), asks)
    assert [a.text for a in first[0]] != [a.text for a in second[0]]
    load_weights(server, MODEL)
    check(server, model, asks)


def load_weights(server, folder):
    """Pause, load a checkpoint, forget what the old weights computed, and go on."""
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert ask_to(server, "pause?mode=wait") == 200
    assert ask_to(server, "collective_rpc", call) == 200
    assert ask_to(server, "reset_prefix_cache") == 200
    assert ask_to(server, "resume") == 200

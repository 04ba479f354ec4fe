"""Answers stay right while a server evicts, pauses, flushes, aborts and loads weights.

The reference is the model itself, which no control request reaches.
"""

import pytest

from integration_tests.common import control
from integration_tests.common.answers import PREFIX, TOPICS, check, on
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL, Ask, together
from integration_tests.hosts import HOST, HostServer

on_small_cache = on("small-cache", rare=["small-cache"] if HOST == "vllm" else [])


def asked(opening, tokens):
    """Completions and chats, streamed or not, of one choice and of several, behind prefixes that
    hold more tokens than the cache."""
    first, second = (f"{topic}: {2 * PREFIX}" for topic in TOPICS[:2])
    story = "Tell me a story about a fox."
    return [
        *(
            together([Ask(f"{each}{opening} {t},", tokens) for t in TOPICS[:3]])
            for each in (first, second)
        ),
        Ask(story, 2 * tokens, system=first),
        Ask(story, 2 * tokens, 2, system=second, stream=True),
        Ask(first + "It said:", tokens, 2, stream=True),
    ]


@on_small_cache
def test_evicted_documents_are_computed_again(server, model):
    """Six documents, more than the cache holds, then the first one again."""
    documents = [f"{topic} " * 20 + PREFIX[:120] for topic in TOPICS]
    before = server.evicted()
    for document in [*documents, documents[0]]:
        check(server, model, [together([Ask(document + end, tokens=5) for end in ("One", "Two")])])
    assert server.evicted() > before
    assert server.state()["steps_tree"] > 0


@on_small_cache
@pytest.mark.parametrize("mode", HostServer.PAUSES)
def test_paused_requests_go_on(server, model, mode):
    def pause():
        server.pause(mode)
        server.resume()

    control.check_while_decoding(server, model, asked("It paused at", 16), pause)


@on_small_cache
def test_the_cache_is_flushed(server, model):
    """While requests decode, SGLang refuses; vLLM preempts them and computes all of them again."""
    asks = asked("They flushed", 14)
    control.check_while_decoding(server, model, asks, server.flush_while_decoding)
    control.until(server.flush)
    check(server, model, [*asks, Ask(PREFIX + "After it.")])


@on_small_cache
def test_every_request_is_aborted(server, model):
    """What came before an abort is right; requests that come later get their answers."""
    asks = [together([Ask(PREFIX + f"Stop {t} {i}", 40) for i in range(3)]) for t in TOPICS[:3]]
    found = control.while_decoding(server, asks, server.abort_all)
    for ours, theirs in zip(found, model.answers(asks), strict=True):
        assert len(ours) == len(theirs) == 3
        assert all(b.text.startswith(a.text) for a, b in zip(ours, theirs, strict=True))
    check(server, model, asked("Later", 8))


@pytest.mark.rare
@on("small-cache")
def test_weights_change_between_rollouts(server, model, tmp_path):
    """As an RL trainer does: samples, new weights, samples, and the old weights.

    SGLang's CPU engine cannot release its memory: `integration_tests/gpu` tests that.
    """
    asks = [Ask(PREFIX + f"Of {topic}", n=4, tokens=6) for topic in TOPICS[:2]]
    first = check(server, model, asks)
    other = control.changed_weights(MODEL, tmp_path)
    server.load_weights(other)
    second = check(server, PlainModel(other), asks)
    assert [a.text for c in first for a in c] != [a.text for c in second for a in c]
    server.load_weights(MODEL)
    check(server, model, asks)


@pytest.mark.rare
@on(sglang=("stages", "engines"))
def test_every_stage_and_every_engine_plans_for_itself(server, model):
    """Stages decode the same batches, engines different ones."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=6, n=2) for t in TOPICS[:4]]
    check(server, model, asks)
    kind = {"stages": "pp", "engines": "dp"}[server.group]
    first, second = (server.state(f"tp0-{kind}{at}")["steps_tree"] for at in range(2))
    assert min(first, second) > 0
    assert server.group == "engines" or first == second

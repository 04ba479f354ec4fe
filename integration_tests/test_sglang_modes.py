"""Answers stay right while a server evicts, pauses, flushes, aborts and loads weights.

The reference is the model itself, which no control request reaches.
"""

import time

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
from integration_tests.sglang_server import Ask, in_shared_memory


@on("small-cache")
def test_evicted_documents_are_computed_again(server, model):
    """Six documents, more than the cache holds, then the first one again."""
    documents = [f"{topic} " * 20 + PREFIX[:120] for topic in TOPICS]
    for document in [*documents, documents[0]]:
        check(server, model, [Ask(document + ending, tokens=6) for ending in ("One", "Two")])
    body = {"model": "default", "prompt": documents[1], "max_tokens": 1, "temperature": 0}
    usage = server.post("v1/completions", body)["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert cached < usage["prompt_tokens"] - 1, "no document was evicted"
    assert server.state()["steps_tree"] > 0


@on("small-cache")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_go_on(server, model, mode):
    asks = [Ask(PREFIX + f"It paused at {t}, and", tokens=16) for t in TOPICS[:3]]

    def pause():
        assert ask_to(server, "pause_generation", {"mode": mode}) == 200
        assert ask_to(server, "continue_generation") == 200

    check_while_decoding(server, model, asks, pause)


@on("small-cache")
def test_the_cache_is_flushed(server, model):
    """The host refuses to flush while requests decode, and flushes when they have ended."""
    asks = [Ask(PREFIX + f"They flushed {t}:", tokens=12) for t in TOPICS[:3]]
    statuses = []
    check_while_decoding(
        server, model, asks, lambda: statuses.append(ask_to(server, "flush_cache"))
    )
    assert ask_to(server, "flush_cache") == 200
    check(server, model, [*asks, Ask(PREFIX + "After it.")])
    assert statuses in ([400], [200])


@on("small-cache")
def test_every_request_is_aborted(server, model):
    """Aborts of all requests, three times; requests that come later get their answers."""
    for topic in TOPICS[:3]:
        asks = [Ask(PREFIX + f"Stop {topic} {i}", tokens=24) for i in range(4)]
        found = while_decoding(
            server, asks, lambda: ask_to(server, "abort_request", {"abort_all": True})
        )
        assert all(len(choices) == 1 for choices in found)
    check(server, model, [Ask(PREFIX + f"Later, {t}") for t in TOPICS[:4]])


@pytest.mark.rare
@on("small-cache")
def test_weights_change_between_rollouts(server, model, tmp_path):
    """As an RL trainer does: samples, new weights, samples, and the old weights.

    The host's CPU engine cannot release its memory: `integration_tests/gpu` tests that.
    """
    asks = [Ask(PREFIX + f"Of {topic}", n=4, tokens=6) for topic in TOPICS[:2]]
    first = check(server, model, asks)
    other = changed_weights(MODEL, tmp_path)
    assert ask_to(server, "pause_generation", {"mode": "retract"}) == 200
    time.sleep(1)  # the host wants to be idle
    assert ask_to(server, "update_weights_from_disk", {"model_path": str(other)}) == 200
    assert ask_to(server, "continue_generation") == 200
    second = check(server, PlainModel(other), asks)
    assert [a.text for c in first for a in c] != [a.text for c in second for a in c]
    assert ask_to(server, "update_weights_from_disk", {"model_path": str(MODEL)}) == 200
    check(server, model, asks)


@pytest.mark.rare
@on("small-cache")
def test_weights_come_as_tensors(server, model, tmp_path):
    asks = [Ask(PREFIX + f"By {topic}", tokens=6) for topic in TOPICS[:3]]
    other = changed_weights(MODEL, tmp_path)
    load_tensors(server, other)
    check(server, PlainModel(other), asks)
    load_tensors(server, MODEL)
    check(server, model, asks)


def load_tensors(server, folder):
    for path, body in (
        ("begin_weight_update", None),
        ("update_weights_from_tensor", in_shared_memory(folder)),
        ("end_weight_update", None),
    ):
        assert ask_to(server, path, body) == 200


@pytest.mark.rare
@on("stages")
def test_every_stage_plans_for_its_layers(server, model):
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=6) for t in TOPICS[:3]]
    check(server, model, [*asks, Ask(PREFIX, n=3)])
    first, second = (server.state(name) for name in ("tp0-pp0", "tp0-pp1"))
    assert first["steps_tree"] == second["steps_tree"] > 0


@pytest.mark.rare
@on("engines")
def test_every_engine_plans_for_its_requests(server, model):
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=6, n=2) for t in TOPICS[:4]]
    check(server, model, asks)
    assert all(server.state(name)["steps_tree"] > 0 for name in ("tp0-dp0", "tp0-dp1"))

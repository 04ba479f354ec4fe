"""Answers stay the host's own while a server evicts, pauses, flushes, aborts and loads weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, assert_same, check, on
from integration_tests.common.control import ask_to, changed_weights, while_decoding
from integration_tests.common.server import MODEL, Reference, Server
from integration_tests.sglang_server import Ask


@on("small-cache", "hierarchical")
def test_evicted_documents_are_computed_again(server: Server, reference) -> None:
    """Six documents, more than the cache holds, then the first one again."""
    documents = [f"{topic} " * 20 + PREFIX[:120] for topic in TOPICS]
    for document in [*documents, documents[0]]:
        check(server, reference, [Ask(document + ending, tokens=6) for ending in ("One", "Two")])
    body = {"model": "default", "prompt": documents[1], "max_tokens": 1, "temperature": 0}
    usage = server.post("v1/completions", body)["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert cached < usage["prompt_tokens"] - 1, "no document was evicted"
    assert server.state()["steps_tree"] > 0


@on("small-cache")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_go_on(server: Server, reference, mode: str) -> None:
    asks = [Ask(PREFIX + f"It paused at {t}, and", tokens=16) for t in TOPICS[:3]]

    def pause() -> None:
        assert ask_to(server, "pause_generation", {"mode": mode}) == 200
        assert ask_to(server, "continue_generation") == 200

    found = while_decoding(server, asks, pause)
    assert_same(asks, found, reference.answers(asks))
    assert not server.trouble()


@on("small-cache", "hierarchical")
def test_the_cache_is_flushed(server: Server, reference) -> None:
    """The host refuses to flush while requests decode, and flushes when they have ended."""
    asks = [Ask(PREFIX + f"They flushed {t}:", tokens=12) for t in TOPICS[:3]]
    statuses: list[int] = []
    found = while_decoding(server, asks, lambda: statuses.append(ask_to(server, "flush_cache")))
    assert_same(asks, found, reference.answers(asks))
    assert ask_to(server, "flush_cache") == 200
    check(server, reference, [*asks, Ask(PREFIX + "After it.")])
    assert statuses in ([400], [200])


@on("small-cache")
def test_every_request_is_aborted(server: Server, reference) -> None:
    """Aborts of all requests, three times; requests that come later get their answers."""
    for topic in TOPICS[:3]:
        asks = [Ask(PREFIX + f"Stop {topic} {i}", tokens=24) for i in range(4)]
        found = while_decoding(
            server, asks, lambda: ask_to(server, "abort_request", {"abort_all": True})
        )
        assert all(len(choices) == 1 for choices in found)
    check(server, reference, [Ask(PREFIX + f"Later, {t}") for t in TOPICS[:4]])


@on("small-cache")
def test_weights_change_between_rollouts(
    server: Server, baseline: Server, reference: Reference, tmp_path: Path
) -> None:
    """As an RL trainer does: samples, new weights, samples, and the old weights again."""
    asks = [Ask(PREFIX + f"Of {topic}", n=4, tokens=6) for topic in TOPICS[:2]]
    first = check(server, reference, asks)
    other = changed_weights(MODEL, tmp_path)
    try:
        for each in (server, baseline):
            assert ask_to(each, "pause_generation", {"mode": "retract"}) == 200
            assert ask_to(each, "update_weights_from_disk", {"model_path": str(other)}) == 200
            assert ask_to(each, "continue_generation") == 200
        second = check(server, Reference(baseline), asks)
        assert [a.text for c in first for a in c] != [a.text for c in second for a in c]
    finally:
        for each in (server, baseline):
            ask_to(each, "update_weights_from_disk", {"model_path": str(MODEL)})
    check(server, reference, asks)

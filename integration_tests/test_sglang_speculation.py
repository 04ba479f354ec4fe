"""Speculation: greedy answers equal the host's without it, and as many drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration_tests.common.answers import (
    PREFIX,
    TOPICS,
    check,
    check_joins_and_aborts,
    on,
)
from integration_tests.common.server import Server
from integration_tests.sglang_server import GROUPS, Ask, running

KINDS = ("ngram", "chains", "trees")


@on(*KINDS)
def test_answers(server: Server, reference) -> None:
    """Shared prefixes, equal prompts, a request that shares nothing, and rejected drafts."""
    middle = PREFIX + f"In the year of {TOPICS[0]} " * 2
    asks = [Ask(middle + f"they found {topic}", tokens=12) for topic in TOPICS[2:4]]
    asks += [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=16) for t in TOPICS[:2]]
    check(server, reference, [*asks, asks[0], Ask("Alone, and quite alone.", tokens=9)])
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["verified_tokens"] > state["steps_tree"]
    assert not state["steps_host"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    assert "verification of" in server.log


@on(*KINDS)
def test_requests_join_and_others_are_aborted(server: Server, reference) -> None:
    first = [Ask(PREFIX + f"Then came {topic},", tokens=14) for topic in TOPICS[:3]]
    later = [Ask(PREFIX + f"Then came {topic}, and", tokens=8) for topic in TOPICS[:2]]
    check_joins_and_aborts(server, reference, kept=first[:2], cut=first[2:], later=later)


@pytest.fixture(scope="session")
def host_with_trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The host's own backend, which verifies the same trees."""
    with running(None, GROUPS["trees"], tmp_path_factory.mktemp("host-trees")) as server:
        yield server


@on("trees")
def test_as_many_drafts_are_accepted(server: Server, host_with_trees: Server) -> None:
    """One request after another: the drafts of each verification then depend on nothing else."""
    prompts = [PREFIX + f"Of {topic} it is told" for topic in TOPICS[:3]]
    assert verifications(server, prompts) == verifications(host_with_trees, prompts)


def verifications(server: Server, prompts: list[str]) -> list[tuple[str, int]]:
    """Each prompt's answer and the verifications that it took."""
    found = []
    for prompt in prompts:
        answer = server.post(
            "generate",
            {
                "text": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
            },
        )
        found.append((answer["text"], answer["meta_info"]["spec_verify_ct"]))
    assert all(1 < count < 24 for _, count in found)
    return found

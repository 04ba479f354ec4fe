"""Speculation: greedy answers equal the host's without it, and as many drafts are accepted."""

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check, check_joins_and_aborts, on
from integration_tests.vllm.vllm_server import GROUPS, Ask, running, together

KINDS = ("lookup", "draft")


@on(*KINDS)
def test_answers(server, reference):
    """Requests of different numbers of drafts in one step; some of the drafts are rejected."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=16) for t in TOPICS[:4]]
    check(server, reference, [together(asks), asks[0], Ask("Alone, and alone.", tokens=9)])
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["verified_tokens"] > 0
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    assert "verification of up to" in server.log


@on(*KINDS)
def test_requests_join_and_others_are_aborted(server, reference):
    first = [Ask(PREFIX + f"Then came {topic},", tokens=12) for topic in TOPICS[:3]]
    later = [Ask(PREFIX + f"Then came {topic}, and", tokens=6) for topic in TOPICS[:2]]
    check_joins_and_aborts(server, reference, kept=first[:2], cut=first[2:], later=later)


@pytest.fixture(scope="session")
def host_with_draft(tmp_path_factory, adapter):
    """The host's own backend, with the same draft model."""
    folder = tmp_path_factory.mktemp("host-draft")
    with running(None, GROUPS["draft"], folder, adapter) as server:
        yield server


@on("draft")
@pytest.mark.rare
def test_as_many_drafts_are_accepted(server, host_with_draft):
    """One request after another: the drafts of each verification then depend on nothing else."""
    found = []
    for each in (server, host_with_draft):
        before = accepted(each)
        for topic in TOPICS[:3]:
            each.complete([Ask(PREFIX + f"Of {topic} it is told", tokens=24)])
        found.append([after - b for after, b in zip(accepted(each), before, strict=True)])
    assert found[0] == found[1]
    drafted, taken = found[0]
    assert drafted / 2 < taken < drafted  # the draft model is made for this


def accepted(server):
    """Draft tokens so far, and those accepted: the host's own counters."""
    return [
        sum(server.metrics(f"vllm:spec_decode_num_{name}_tokens_total").values())
        for name in ("draft", "accepted")
    ]

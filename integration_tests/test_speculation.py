"""Speculation: greedy answers are the right ones, and as many drafts are accepted."""

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check, on
from integration_tests.common.counted import check_metrics
from integration_tests.common.server import Ask, together
from integration_tests.hosts import GROUPS, HOST, running

speculating = on(
    sglang=("chain", "tree", "lookup", "chain-pages"),
    vllm=("lookup", "draft"),
    rare=["lookup", "chain-pages"] if HOST == "sglang" else [],
)


@speculating
def test_answers(server, model):
    """Requests of different numbers of drafts in one step, one that ends early, and one alone."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=16) for t in TOPICS[:4]]
    asks = [together(asks[:3]), asks[3], Ask(PREFIX, tokens=5), Ask("Alone, and alone.", tokens=9)]
    check(server, model, asks)
    state = check_metrics(server) if HOST == "vllm" else server.state()
    assert state["steps_tree"] > 0
    assert state["verified_tokens"] > 0
    assert HOST == "vllm" or not state["steps_host"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    assert "deft: verification of" in server.log


@pytest.fixture
def host(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"host-{server.group}")
    with running(None, GROUPS[server.group], folder) as running_host:
        yield running_host


@on(sglang=("chain", "tree"), vllm=("draft",))
@pytest.mark.rare
def test_as_many_drafts_are_accepted(server, host):
    """One request after another: the drafts of each verification then depend on nothing else."""
    prompts = [f"{PREFIX}Of {topic} it is told" for topic in TOPICS[:3]]
    found = [[each.drafts(prompt) for prompt in prompts] for each in (server, host)]
    assert found[0] == found[1]
    verified, accepted = (sum(counts) for counts in zip(*found[0], strict=True))
    assert verified < accepted  # the draft model is made for this

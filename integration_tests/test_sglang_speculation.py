"""Speculation: greedy answers are the model's own, and as many drafts are accepted."""

import pytest

from integration_tests.common.answers import PREFIX, TOPICS, check, check_joins_and_aborts, on
from integration_tests.sglang_server import GROUPS, Ask, running


@on("chain", "tree")
def test_answers(server, model):
    check_answers(server, model)


@on("lookup", "chain-pages")
@pytest.mark.rare
def test_answers_with_n_grams_and_with_larger_pages(server, model):
    check_answers(server, model)


def check_answers(server, model):
    """Requests that share a prefix, one that ends early, and one alone."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=14) for t in TOPICS[:3]]
    check(server, model, [*asks, Ask(PREFIX, tokens=5), Ask("Alone, and alone.", tokens=9)])
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["verified_tokens"] > 0
    assert not state["steps_host"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    assert "deft: verification of" in server.log


@on("chain", "tree")
def test_requests_join_and_others_are_aborted(server, model):
    first = [Ask(PREFIX + f"Then came {topic},", tokens=12) for topic in TOPICS[:3]]
    later = [Ask(PREFIX + f"Then came {topic}, and", tokens=6) for topic in TOPICS[:2]]
    check_joins_and_aborts(server, model, kept=first[:2], cut=first[2:], later=later)


@pytest.fixture
def host(server, request, tmp_path_factory):
    """The host's own backend, with the flags of the test's group."""
    group = request.node.callspec.params["server"]
    folder = tmp_path_factory.mktemp(f"host-{group}")
    with running(None, GROUPS[group], folder) as running_host:
        yield running_host


@on("chain", "tree")
@pytest.mark.rare
def test_as_many_drafts_are_accepted(server, host):
    """One request after another: the drafts of each verification then depend on nothing else."""
    prompts = [f"{PREFIX}Of {topic} it is told" for topic in TOPICS[:3]]
    found = [[drafts(each, prompt) for prompt in prompts] for each in (server, host)]
    assert found[0] == found[1]
    verified, accepted = (sum(counts) for counts in zip(*found[0], strict=True))
    assert verified < accepted  # the draft model is made for this


def drafts(server, prompt):
    """Verifications and accepted drafts of a request, by the host's own count."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    found = server.post("generate", {"text": prompt, "sampling_params": sampling})["meta_info"]
    return found["spec_verify_ct"], found["spec_num_correct_drafts"]

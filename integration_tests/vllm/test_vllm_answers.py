"""Every answer equals the host's own, token by token, with vLLM's features in use."""

import re

import pytest

from deft_backend.hosts.vllm.versions import backend_name
from integration_tests.common.answers import (
    POLICY_GROUPS,
    PREFIX,
    RARE_POLICIES,
    TOPICS,
    check,
    check_both_ranks,
    check_joins_and_aborts,
    check_policy,
    on,
)
from integration_tests.vllm.vllm_server import GROUPS, Ask, running, together


@on("default", "pressed", smoke=["default"])
def test_shared_prefix(server, reference):
    before = server.state()
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=24) for t in TOPICS]
    check(server, reference, [*asks[:4], together(asks[4:])])
    after = server.state()
    assert after["steps_tree"] > before["steps_tree"]
    assert after["backend"] == backend_name()
    assert after["host"] == "vllm"


@on("default", smoke=["default"])
def test_fewer_bytes_are_read(server, reference):
    """The kernels read shared KV once. The amount saved depends on when requests meet."""
    server.complete([Ask(PREFIX, tokens=1)])  # the next ones find its blocks
    before = server.state()
    asks = [Ask(PREFIX + f"Of {t} it is told", tokens=24) for t in TOPICS]
    check(server, reference, [*asks[:4], together(asks[4:])])
    after = server.state()
    read, guided = (
        after[name] - before[name] for name in ("kv_bytes_read", "kv_bytes_query_guided")
    )
    assert 0 < read < guided
    assert after["decode_steps"] == after["steps_tree"] + sum(after["steps_host"].values())


@on("default", smoke=["default"])
def test_levels_equal_prompts_and_loners(server, reference):
    middle = [PREFIX + f"In the year of {topic} " * 2 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}", tokens=6) for m in middle for topic in TOPICS[2:4]]
    check(server, reference, [*asks, asks[0], Ask("Alone.", tokens=6)])


@on("default")
def test_several_samples_of_one_prompt(server, reference):
    """``n`` sampled answers with a seed: equal distributions give equal samples."""
    (answers,) = check(server, reference, [Ask(PREFIX + "Of the keeper it said:", n=4, tokens=10)])
    assert len({answer.text for answer in answers}) > 1


@on("default")
def test_beam_search(server, reference):
    """Each step of a beam computes its last partial block again: here 2 to 7 tokens."""
    (answers,) = check(server, reference, [Ask(PREFIX[: 6 * 32 + 1], tokens=7, beams=3)])
    assert len({answer.text for answer in answers}) == 3


@on("default")
def test_second_turns_and_calls_of_tools(server, reference):
    """The histories fill whole blocks, so only the last words are new."""
    first = [Ask(PREFIX[: 5 * 32] + f"{topic:.<32}", tokens=1) for topic in TOPICS[:4]]
    check(server, reference, [together(first)])
    turns = [Ask(ask.prompt + said, tokens=5) for ask in first for said in (" And?", "[17, 4]")]
    check(server, reference, [together(turns)])


@on("default")
def test_log_probabilities(server, reference):
    asks = [Ask(PREFIX + f"Next to {topic}", tokens=5, logprobs=5) for topic in TOPICS[:3]]
    for (answer,) in check(server, reference, asks):
        assert all(len(top) >= 5 for top in answer.likeliest)


@on("default")
def test_guided_decoding(server, reference):
    pattern = r"[0-9]{3}-[a-f]{2}\."
    asks = [Ask(PREFIX + f"The number of {t} is ", 12, pattern=pattern) for t in TOPICS[:3]]
    asks.append(Ask(PREFIX + "And freely:", tokens=8))
    *guided, _ = check(server, reference, asks)
    for (answer,) in guided:
        assert re.fullmatch(pattern, answer.text)


@on("default")
def test_an_adapter_beside_its_base(server, reference):
    """The same prompts without and then with LoRA: their cached KV differs.

    The test sends them one after the other. If they are sent at once, vLLM's CPU build answers some
    requests without LoRA as if they had named the adapter. vLLM's own attention has the same fault.
    """
    plain = [Ask(PREFIX + f"Under {t}", tokens=8) for t in TOPICS[:3]]
    adapted = [Ask(ask.prompt, tokens=8, model="adapted") for ask in plain]
    found = [check(server, reference, asks) for asks in (plain, adapted)]
    assert [a.text for (a,) in found[0]] != [a.text for (a,) in found[1]]


@on("default")
def test_requests_join_and_others_are_aborted(server, reference):
    """One of three streams is cut off; two requests join while the others decode."""
    first = [Ask(PREFIX + f"Then came {topic},", tokens=12) for topic in TOPICS[:3]]
    later = [Ask(PREFIX + f"Then came {topic}, and", tokens=6) for topic in TOPICS[:2]]
    check_joins_and_aborts(server, reference, kept=first[:2], cut=first[2:], later=later)


@on("pressed")
def test_long_prompts_come_in_pieces(server, reference):
    """The host prefills a prompt in several pieces while other requests decode."""
    asks = [Ask(f"A short line about {TOPICS[0]}", tokens=10)]
    asks += [Ask(PREFIX[:190] + f"Of {topic}:", tokens=5) for topic in TOPICS[1:3]]
    check(server, reference, asks)


def preemptions(server):
    """The host's own count."""
    figures = server.metrics("vllm:num_preemptions_total")
    assert figures, "the host has no such counter"
    return sum(figures.values())


@on("pressed")
def test_preempted_requests_come_back(server, reference):
    """19 blocks are there, and 5 requests grow to 5 blocks each."""
    before = preemptions(server)
    asks = [Ask(PREFIX[:100] + f" Tell of {topic}:", tokens=32) for topic in TOPICS[:5]]
    check(server, reference, asks)
    assert preemptions(server) > before


@on("pressed")
def test_without_prefix_caching_nothing_is_shared(server, reference):
    """Every request is a leaf then; its decode still goes through the kernels."""
    check(server, reference, [Ask(PREFIX + f"Twice {topic}", tokens=4) for topic in TOPICS[:2]])
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["kv_bytes_read"] == state["kv_bytes_query_guided"]


def test_the_hosts_own_backend_is_left_alone(baseline):
    """A server that does not ask for the plugin."""
    baseline.complete([Ask("A short line about rain.", tokens=4)] * 2)
    assert not [line for line in baseline.trouble() if "deft" in line]


@pytest.mark.rare
def test_an_installed_plugin_changes_nothing_that_anybody_sees(tmp_path, adapter, monkeypatch):
    """A server that does not ask for the plugin, beside one that does not load it."""
    seen = []
    for plugins in (None, ""):
        if plugins is not None:
            monkeypatch.setenv("VLLM_PLUGINS", plugins)
        with running(None, GROUPS["default"], tmp_path / f"{plugins}", adapter) as server:
            server.complete([Ask("A short line about rain.", tokens=4)] * 2)
            seen.append(server.traits())
    for installed, without in zip(*seen, strict=True):
        assert installed ^ without == set()


@on("two-ranks")
def test_every_rank_plans_for_itself(server, reference):
    """Half of the heads each, one tree: the answers are those of one rank with all heads."""
    server.complete([Ask(PREFIX, tokens=1)])  # the next ones find its blocks
    asks = [Ask(PREFIX + f"Of {topic} it is told", tokens=6) for topic in TOPICS[:4]]
    check(server, reference, [*asks, Ask("Alone, from the first word on.", tokens=6)])
    check_both_ranks(server)


@on(*POLICY_GROUPS, rare=RARE_POLICIES)
def test_every_policy(server, reference, request):
    middle = [PREFIX + f"In the year of {topic} " * 2 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}", tokens=6) for m in middle for topic in TOPICS[2:4]]
    asks += [asks[0], Ask("Alone.", tokens=6)]
    check_policy(server, reference, asks, request.node.callspec.params["server"])

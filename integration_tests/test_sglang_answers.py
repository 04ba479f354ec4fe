"""Every greedy answer is the model's own, token by token, under every kind of traffic."""

import importlib.util
import re
from dataclasses import replace

import pytest

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
from integration_tests.sglang_server import Ask


@on("default", "no-overlap", "chunked-pages", "no-radix", smoke=["default"])
def test_shared_prefix(server, model):
    check(server, model, [Ask(PREFIX + f"Tonight it spoke of {t}.") for t in TOPICS])


@on("default", "chunked-pages", "retracting")
def test_equal_prompts_and_prompts_that_are_prefixes(server, model):
    whole = PREFIX + "Nobody came."
    check(server, model, [Ask(whole), Ask(whole), Ask(whole[:-7]), Ask(PREFIX)])


@on("default", "no-overlap", "chunked-pages")
def test_forked(server, model):
    check(server, model, [Ask(PREFIX + "Of the keeper it said:", n=4)])


@on("default", "no-overlap", "chunked-pages", "retracting", smoke=["default"])
def test_levels(server, model):
    middle = [PREFIX + f"In the year of {topic} " * 3 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}") for m in middle for topic in TOPICS[2:5]]
    check(server, model, [*asks, Ask(PREFIX + "Alone.")])


@on("default", "chunked-pages")
def test_unshared(server, model):
    check(server, model, [Ask(f"{topic}: {topic * 12}") for topic in TOPICS[:4]])


@on("default", "chunked-pages")
def test_single(server, model):
    check(server, model, [Ask(PREFIX)])


@on("default", "no-overlap")
def test_different_lengths_leave_one_by_one(server, model):
    asks = [Ask(PREFIX + f"A list of {t}:", tokens=2 + 3 * i) for i, t in enumerate(TOPICS[:5])]
    check(server, model, asks)


@on("default", "no-overlap", "chunked-pages", "retracting")
def test_requests_join_and_others_are_aborted(server, model):
    """Two of four streams are cut off; two requests join while the others decode."""
    first = [Ask(PREFIX + f"Then came {topic},", tokens=14) for topic in TOPICS[:4]]
    later = [Ask(PREFIX + f"Then came {topic}, and", tokens=8) for topic in TOPICS[:2]]
    check_joins_and_aborts(server, model, kept=first[:2], cut=first[2:], later=later)
    again = [Ask(PREFIX + f"Afterwards, {topic}") for topic in TOPICS[:3]]
    check(server, model, again)


@on("two-ranks")
def test_every_rank_plans_for_itself(server, model):
    """Two ranks hold half of the heads each: the answers equal those of one rank with all heads."""
    middle = [PREFIX + f"In the year of {topic} " * 3 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}") for m in middle for topic in TOPICS[2:4]]
    check(server, model, [*asks, Ask("Alone, from the first word on.")])
    first = [Ask(PREFIX + f"Then came {topic},", tokens=10) for topic in TOPICS[:3]]
    later = [Ask(PREFIX + f"Then came {TOPICS[0]}, and", tokens=6)]
    check_joins_and_aborts(server, model, kept=first[:2], cut=first[2:], later=later)
    check_both_ranks(server)


@on("mixed", "mixed-ranks", rare=["mixed-ranks"])
def test_prompts_arrive_while_others_decode(server, model):
    """Chunks of prefill share steps with requests that decode; some of these are aborted."""

    def ask(prompt, tokens, n=1):
        return Ask(prompt, tokens, n, logprobs=False)

    first = [ask(PREFIX + f"Then came {topic},", 24) for topic in TOPICS[:4]]
    later = [ask(f"{topic} " * 12 + PREFIX + "And then", 12) for topic in TOPICS[3:]]
    check_joins_and_aborts(server, model, kept=first[:3], cut=first[3:], later=later)
    check(server, model, [ask(PREFIX + f"Afterwards, {t}", 10, n=2) for t in TOPICS[:3]])
    mixed = [each for each in server.state()["steps"] if each["kind"] == "mixed"]
    assert sum(each["steps"] for each in mixed if each["reason"] is None) > 0
    assert {each["reason"] for each in mixed} <= {None, "shares too little to be split"}


@on("retracting")
def test_retracted_requests_come_back(server, model):
    """The host retracts requests while they decode, and prefills them again later."""
    asks = [Ask(PREFIX + f"Tell of {topic}:", tokens=20) for topic in TOPICS]
    check(server, model, asks)
    retracted = re.findall(r"#retracted_reqs: (\d+)", server.log)
    assert sum(map(int, retracted)) >= 2
    assert server.state()["steps_tree"] > 0


@on("default", "no-overlap", "chunked-pages", smoke=["default"])
def test_fewer_bytes_are_read(server, model):
    """A shared batch goes through tree attention and reads less than request by request."""
    before = server.state()
    asks = [Ask(PREFIX + f"Of {topic} it is told", tokens=10) for topic in TOPICS]
    # On few cores, requests may arrive so late that each decodes alone; choices of one request
    # decode together.
    check(server, model, [*asks, replace(asks[0], n=4)])
    after = server.state()
    read, guided, steps = (
        after[name] - before[name]
        for name in ("kv_bytes_read", "kv_bytes_query_guided", "steps_tree")
    )
    # The amount depends on when requests meet, and so on the machine.
    assert steps > 0
    assert 0 < read < guided
    assert after["backend"] == "deft"
    assert after["decode_steps"] == after["steps_tree"] + sum(after["steps_host"].values())
    assert after["plans"] == after["steps_tree"]


@on("retracting")
def test_every_step_is_planned(server, model):
    """Requests with and without sharing, and some that the host retracts and prefills again."""
    asks = [Ask(PREFIX + f"Say of {topic}:", tokens=16) for topic in TOPICS[:4]]
    check(server, model, [*asks, Ask("Once upon a time", tokens=16)])
    state = server.state()
    assert state["steps_tree"] > 0
    assert not state["steps_host"]
    assert state["plans"] == state["steps_tree"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    assert 1 <= server.explain()["batch_size"] <= len(asks) + 1


@on("no-radix")
def test_without_a_radix_tree_the_kernels_still_run(server, model):
    """Without a cache nothing is shared: every request is a leaf, and the answers are the same."""
    check(server, model, [Ask(PREFIX + topic) for topic in TOPICS[:3]])
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["kv_bytes_read"] == state["kv_bytes_query_guided"]


@on(*POLICY_GROUPS, rare=RARE_POLICIES)
def test_every_policy(server, model, request):
    middle = [PREFIX + f"In the year of {topic} " * 2 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}", tokens=6) for m in middle for topic in TOPICS[2:4]]
    asks += [asks[0], Ask("Alone.", tokens=6)]
    check_policy(server, model, asks, request.node.callspec.params["server"])


@on("default", "policy-fasttree")
def test_beam_search(server, baseline):
    """Beams fork in every step: each beam has the host's tokens, in the host's order."""
    width = 12
    if importlib.util.find_spec("sglang.srt.beam_search") is None:
        pytest.skip("this version of SGLang has no beam search")
    settings = {"temperature": 0, "max_new_tokens": 8, "beam_width": width, "n": width}
    body = {"text": PREFIX + "Once,", "sampling_params": {**settings, "ignore_eos": True}}
    before = server.state()
    ours, theirs = (
        each.post("generate", body)["meta_info"]["beam_results"] for each in (server, baseline)
    )
    assert [beam["output_ids"] for beam in ours] == [beam["output_ids"] for beam in theirs]
    assert len({tuple(beam["output_ids"]) for beam in ours}) == width
    scores = [[beam["meta_info"]["sequence_score"] for beam in found] for found in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    after = server.state()
    assert after["steps_tree"] >= before["steps_tree"] + 7
    assert after["steps_host"] == before["steps_host"]
    assert not server.trouble()

"""Every answer is the right one, token by token, under every kind of traffic."""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deft_backend.tools.servers.command import BACKEND_NAMES
from integration_tests.common.answers import (
    PREFIX,
    RARE_POLICIES,
    TOPICS,
    check,
    check_joins_and_aborts,
    on,
)
from integration_tests.common.counted import check_metrics
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL, POLICY_GROUPS, Ask, Reference, ask_to, together
from integration_tests.hosts import HOST

NOTHING_CACHED = ("no-radix", "pressed")


@on(
    "default", sglang=("no-overlap", "retracting", "no-radix"), vllm=("pressed",), smoke=["default"]
)
def test_a_shared_prefix_is_read_once(server, model):
    """Without a cache nothing is shared: every request is a leaf, and the answers are the same."""
    server.complete([Ask(PREFIX, tokens=1)])  # the next ones find its pages
    before = server.state()
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=12) for t in TOPICS]
    check(server, model, [*asks[:3], together(asks[3:])])
    after = server.state()
    read, guided, steps = (
        after[name] - before[name]
        for name in ("kv_bytes_read", "kv_bytes_query_guided", "steps_tree")
    )
    # The amount depends on when requests meet, and so on the machine.
    assert steps > 0
    assert 0 < read < guided or (read == guided and server.group in NOTHING_CACHED)
    assert (after["host"], after["backend"]) == (HOST, BACKEND_NAMES[HOST])
    assert after["decode_steps"] == after["steps_tree"] + sum(after["steps_host"].values())
    assert after["plans"] == after["steps_tree"]


@on("default", sglang=("no-overlap", "retracting"), smoke=["default"])
def test_levels_equal_prompts_forks_and_loners(server, model):
    """Requests of different lengths leave one by one."""
    middle = [PREFIX + f"In the year of {topic} " * 3 for topic in TOPICS[:2]]
    asks = [
        Ask(m + f"they found {topic}", tokens=2 + 3 * i)
        for m in middle
        for i, topic in enumerate(TOPICS[2:5])
    ]
    asks += [asks[2], Ask(PREFIX), Ask(PREFIX[:-7]), Ask(PREFIX + "Of the keeper it said:", n=4)]
    check(server, model, [*asks, *(Ask(f"{topic}: {topic * 12}") for topic in TOPICS[:2])])


@on("default", sglang=("no-overlap", "retracting", "chain", "tree"), vllm=("lookup", "draft"))
def test_requests_join_and_others_are_aborted(server, model):
    """Two of four streams are cut off; two requests join while the others decode."""
    first = [Ask(PREFIX + f"Then came {topic},", tokens=14) for topic in TOPICS[:4]]
    later = [Ask(PREFIX + f"Then came {topic}, and") for topic in TOPICS[:2]]
    check_joins_and_aborts(server, model, kept=first[:2], cut=first[2:], later=later)
    check(server, model, [Ask(PREFIX + f"Afterwards, {topic}") for topic in TOPICS[:3]])


@on("two-ranks")
def test_every_rank_plans_for_itself(server, model):
    """Two ranks hold half of the heads each: the answers equal those of one rank with all heads."""
    server.complete([Ask(PREFIX, tokens=1)])
    asks = [Ask(PREFIX + f"Of {topic} it is told", tokens=6) for topic in TOPICS[:4]]
    check(server, model, [together(asks), Ask("Alone, from the first word on.", tokens=6)])
    first = [Ask(PREFIX + f"Then came {topic},", tokens=10) for topic in TOPICS[:3]]
    later = [Ask(PREFIX + f"Then came {TOPICS[0]}, and", tokens=6)]
    check_joins_and_aborts(server, model, kept=first[:2], cut=first[2:], later=later)
    ours, theirs = server.state("tp0"), server.state("tp1")
    assert 0 < ours["kv_bytes_read"] < ours["kv_bytes_query_guided"]
    for name in ("steps_tree", "steps_host", "kv_bytes_read", "kv_bytes_query_guided"):
        assert ours[name] == theirs[name], name
    assert (ours["rank"], theirs["rank"]) == (0, 1)
    assert ours["num_kv_heads"] == theirs["num_kv_heads"] == 1


@on(sglang=("mixed", "mixed-ranks"), vllm=("chunks-of-16", "lookup"), rare=["mixed-ranks"])
def test_prompts_arrive_while_others_decode(server, model):
    """One stream is cut off; prompts of several chunks arrive while three others decode."""

    def ask(prompt, tokens):
        return Ask(prompt, tokens, logprobs=int(HOST == "vllm"))

    def mixed():
        state = check_metrics(server) if HOST == "vllm" else server.state()
        rows = [row for row in state["steps"] if row["kind"] == "mixed" and row["reason"] is None]
        return [sum(row[name] for row in rows) for name in ("steps", "rows")]

    server.complete([Ask(PREFIX, tokens=1)])
    steps_before, rows_before = mixed()
    first = [ask(PREFIX + f"At dusk came {topic},", 24) for topic in TOPICS[:3]]
    lengths = zip(TOPICS[3:], (40, 90, 150), strict=True)
    later = [ask(f"Of {topic}: " + PREFIX[:length], 8) for topic, length in lengths]
    later.append(ask(PREFIX + "And then, at last, " + PREFIX[:70], 8))
    cut = [ask(PREFIX + "One left", 8)]
    check_joins_and_aborts(server, model, kept=[together(first)], cut=cut, later=later)
    steps, rows = mixed()
    assert steps > steps_before
    assert rows - rows_before >= 2 * (steps - steps_before)
    assert "mixed" in server.log


@on(sglang=("retracting",), vllm=("pressed", "chunks-of-16"))
def test_requests_that_the_host_takes_back_come_again(server, model):
    """SGLang's switch for tests retracts requests; vLLM's caches hold too few blocks for these."""
    before = server.taken_back()
    shared, tokens = {"pressed": (100, 32), "chunks-of-16": (210, 60)}.get(server.group, (210, 20))
    asks = [Ask(PREFIX[:shared] + f" Tell of {topic}:", tokens=tokens) for topic in TOPICS]
    asks += [Ask(f"{topic} and " + PREFIX[:100], tokens=tokens // 2) for topic in TOPICS[:3]]
    check(server, model, asks)
    assert server.taken_back() > before
    state = server.state()
    assert state["plans"] == state["steps_tree"] > 0
    assert HOST == "vllm" or not state["steps_host"]


@on(*POLICY_GROUPS, rare=RARE_POLICIES)
def test_every_policy(server, model):
    """The log names the policy that the group is named after."""
    middle = [PREFIX + f"In the year of {topic} " * 2 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}", tokens=6) for m in middle for topic in TOPICS[2:4]]
    check(server, model, [*asks, asks[0], Ask("Alone.", tokens=6)])
    assert server.state()["steps_tree"] > 0
    assert server.group.removeprefix("policy-") in server.log


@on(sglang=("default", "policy-fasttree"))
def test_beam_search_forks_in_every_step(server, baseline):
    """Each beam has the host's tokens, in the host's order."""
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


@on(vllm=("default",))
def test_beams_samples_patterns_and_log_probabilities(server, baseline):
    """Equal distributions give equal samples to a seed. Each step of a beam computes its last
    partial block again: here 2 to 7 tokens."""
    pattern = r"[0-9]{3}-[a-f]{2}\."
    asks = [Ask(PREFIX + f"The number of {t} is ", 12, pattern=pattern) for t in TOPICS[:3]]
    asks.append(Ask(PREFIX + "Of the keeper it said:", n=4, tokens=10, sampled=True))
    asks.append(Ask(PREFIX + f"Next to {TOPICS[0]}", tokens=5, logprobs=5))
    reference = Reference(baseline)
    *guided, samples, (likeliest,) = check(server, reference, asks)
    assert all(re.fullmatch(pattern, answer.text) for (answer,) in guided)
    assert len({answer.text for answer in samples}) > 1
    assert all(len(top) >= 5 for top in likeliest.likeliest)
    (beams,) = check(server, reference, [Ask(PREFIX[: 6 * 32 + 1], tokens=7, beams=3)])
    assert len({answer.text for answer in beams}) == 3


@on(vllm=("default",))
def test_second_turns_and_calls_of_tools(server, model):
    """The histories fill whole blocks, so only the last words are new."""
    first = [Ask(PREFIX[: 5 * 32] + f"{topic:.<32}", tokens=1) for topic in TOPICS[:4]]
    check(server, model, [together(first)])
    turns = [Ask(ask.prompt + said, tokens=5) for ask in first for said in (" And?", "[17, 4]")]
    check(server, model, [together(turns)])


@on(vllm=("default",))
def test_an_adapter_beside_its_base(server, baseline):
    """The same prompts without and then with LoRA: their cached KV differs.

    The test sends them one after the other. If they are sent at once, vLLM's CPU build answers some
    requests without LoRA as if they had named the adapter. vLLM's own attention has the same fault.
    """
    plain = [Ask(PREFIX + f"Under {t}") for t in TOPICS[:3]]
    adapted = [Ask(ask.prompt, model="adapted") for ask in plain]
    reference = Reference(baseline)
    found = [check(server, reference, asks) for asks in (plain, adapted)]
    assert [a.text for (a,) in found[0]] != [a.text for (a,) in found[1]]


@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="the host's own FP8 needs AVX-512"
)
@on(vllm=("fp8",))
def test_answers_over_an_fp8_cache(server):
    """Each decode step is also compared with the host's kernel over the same cache."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=12, logprobs=5) for t in TOPICS]
    asks = [asks[0], together(asks[1:])]
    check(server, PlainModel(MODEL, torch.float8_e4m3fn), asks)
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["dtype_bytes"] == 1


@on(sglang=("default",))
def test_turns_of_streaming_sessions_behind_one_prefix(server, model):
    check(server, model, [Ask(PREFIX)])
    opened = {"capacity_of_str_len": 10000, "streaming": True}
    contexts = {server.post("open_session", opened): [] for _ in range(4)}
    steps = server.state()["steps_tree"]

    def turn(session, text):
        ids = model.ids(text)
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        asked = {"input_ids": ids, "session_params": {"id": session}, "sampling_params": sampling}
        contexts[session] += ids
        found = server.post("generate", asked)["output_ids"]
        assert found == model.greedy(contexts[session], 6)[0]
        contexts[session] += found

    with ThreadPoolExecutor(len(contexts)) as threads:
        for number in range(3):
            texts = [f"{'' if number else PREFIX}{topic} {number}," for topic in TOPICS]
            list(threads.map(turn, contexts, texts))
    for session in contexts:
        assert ask_to(server, "close_session", {"session_id": session}) == 200
    assert server.state()["steps_tree"] > steps
    assert "cannot be read" not in server.log


def bits(answers):
    return [(a.token_texts, a.logprobs, a.likeliest) for choices in answers for a in choices]


@on(vllm=("invariant",))
def test_a_request_has_equal_bits_alone_and_in_batches(server):
    """In vLLM's batch-invariant mode: shared prefixes, equal prompts and others; with and without
    cached prefixes.
    """
    pytest.importorskip("vllm.model_executor.determinism")  # what the tests' CPU backend replaces
    lengths = (97, 113, 161, 200, 40, 31)
    asks = [
        Ask(PREFIX[:length] + topic * (at % 2), tokens=10, logprobs=5)
        for at, (topic, length) in enumerate(zip(TOPICS, lengths, strict=True))
    ]
    alone = []
    for ask in asks:
        assert ask_to(server, "reset_prefix_cache") == 200
        alone += bits(server.complete([ask]))
    for order in (asks, [*asks[::-1], *asks[3:]], [*asks[1:], *asks]):
        found = dict(zip(order, bits(server.complete(order)), strict=True))
        assert [found[ask] for ask in asks] == alone
    assert ask_to(server, "reset_prefix_cache") == 200
    assert bits(server.complete(asks)) == alone
    state = server.state()
    assert state["policy"] == "invariant"
    assert not state["steps_host"]
    assert {row["kind"] for row in state["steps"]} == {"decode", "mixed"}
    assert not server.trouble()

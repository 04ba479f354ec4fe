"""Prompts that come in chunks while others decode: every answer equals the host's own."""

from integration_tests.common.answers import PREFIX, TOPICS, check, check_joins_and_aborts, on
from integration_tests.common.counted import check_metrics
from integration_tests.vllm.test_vllm_answers import preemptions
from integration_tests.vllm.vllm_server import Ask, together

CHUNKED = ("chunks-of-16", "chunks-of-64", "chunks-lookup")


def mixed_steps(state):
    """Steps and decode rows of mixed steps: through tree attention, and through the host."""
    rows = [row for row in state["steps"] if row["kind"] == "mixed"]
    return [
        tuple(
            sum(row[name] for row in rows if (row["reason"] is None) is tree)
            for name in ("steps", "rows")
        )
        for tree in (True, False)
    ]


@on(*CHUNKED)
def test_prompts_arrive_while_others_decode(server, reference):
    """One stream is cut off; three prompts of several chunks arrive while three others decode."""
    server.complete([Ask(PREFIX, tokens=1)])  # the next ones find its blocks
    (before, rows_before), _ = mixed_steps(server.state())
    first = [Ask(PREFIX + f"At dusk came {topic},", tokens=24) for topic in TOPICS[:3]]
    lengths = zip(TOPICS[3:], (40, 90, 150), strict=True)
    later = [Ask(f"Of {topic}: " + PREFIX[:n], tokens=8) for topic, n in lengths]
    later.append(Ask(PREFIX + "And then, at last, " + PREFIX[:70], tokens=8))
    check_joins_and_aborts(
        server, reference, kept=[together(first)], cut=[Ask(PREFIX + "One left")], later=later
    )
    (steps, rows), _ = mixed_steps(check_metrics(server))
    assert steps > before
    assert rows - rows_before >= 2 * (steps - before)
    assert "mixed" in server.log


@on("chunks-of-16")
def test_equal_prompts_while_others_arrive(server, reference):
    """Without seeds: in a chunk of a seeded prompt, vLLM's CPU engine asks its generator for an
    offset, which it lacks, and ends."""
    (before, _), _ = mixed_steps(server.state())
    asks = [Ask(PREFIX + "Of the keeper it said:", tokens=20)] * 4
    asks += [Ask(f"Of {topic}: " + PREFIX[:120], tokens=6) for topic in TOPICS[:3]]
    check(server, reference, asks)
    (steps, _), _ = mixed_steps(server.state())
    assert steps > before


@on("chunks-of-16")
def test_preempted_requests_come_back_in_chunks(server, reference):
    """The cache holds too few blocks for six requests that grow."""
    before = preemptions(server)
    asks = [Ask(PREFIX + f" Tell of {topic}:", tokens=60) for topic in TOPICS]
    asks += [Ask(f"{topic} and " + PREFIX[:100], tokens=30) for topic in TOPICS[:3]]
    check(server, reference, asks)
    assert preemptions(server) > before

"""Every greedy answer equals the host's own, token for token, whatever the traffic looks like."""

from __future__ import annotations

import asyncio
import re

import pytest
from sglang_server import Answer, Ask, Server, complete

TOPICS = ("the harbour", "an old map", "seven lamps", "the northern road", "a grey cat", "salt")
PREFIX = (
    "The library stood at the corner of two narrow streets, and every evening its keeper lit the "
    "lamps, counted the readers, closed the shutters one by one, and wrote a short line into the "
    "long book of days. "
)


def on(*groups: str) -> pytest.MarkDecorator:
    """Run the test on a server of each group."""
    return pytest.mark.parametrize("server", groups, indirect=True)


def assert_same(asks: list[Ask], found: list[list[Answer]], expected: list[list[Answer]]) -> None:
    for ask, ours, theirs in zip(asks, found, expected, strict=True):
        assert len(ours) == ask.n
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_texts == b.token_texts, f"after {ask.prompt[-40:]!r}"
            assert a.text == b.text
            assert a.finish == b.finish == "length"
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


def check(server: Server, reference, asks: list[Ask]) -> None:
    assert_same(asks, server.complete(asks), reference.answers(asks))
    assert not server.trouble()


@on("default", "no-overlap", "chunked-pages", "no-radix")
def test_shared_prefix(server: Server, reference) -> None:
    check(server, reference, [Ask(PREFIX + f"Tonight it spoke of {t}.") for t in TOPICS])


@on("default", "chunked-pages", "device-planner")
def test_equal_prompts_and_prompts_that_are_prefixes(server: Server, reference) -> None:
    whole = PREFIX + "Nobody came."
    check(server, reference, [Ask(whole), Ask(whole), Ask(whole[:-7]), Ask(PREFIX)])


@on("default", "no-overlap", "chunked-pages")
def test_forked(server: Server, reference) -> None:
    check(server, reference, [Ask(PREFIX + "Of the keeper it said:", n=4)])


@on("default", "no-overlap", "chunked-pages", "device-planner")
def test_levels(server: Server, reference) -> None:
    middle = [PREFIX + f"In the year of {topic} " * 3 for topic in TOPICS[:2]]
    asks = [Ask(m + f"they found {topic}") for m in middle for topic in TOPICS[2:5]]
    check(server, reference, [*asks, Ask(PREFIX + "Alone.")])


@on("default", "chunked-pages")
def test_unshared(server: Server, reference) -> None:
    check(server, reference, [Ask(f"{topic}: {topic * 12}") for topic in TOPICS[:4]])


@on("default", "chunked-pages")
def test_single(server: Server, reference) -> None:
    check(server, reference, [Ask(PREFIX)])


@on("default", "no-overlap")
def test_different_lengths_leave_one_by_one(server: Server, reference) -> None:
    asks = [Ask(PREFIX + f"A list of {t}:", tokens=2 + 3 * i) for i, t in enumerate(TOPICS[:5])]
    check(server, reference, asks)


@on("default", "no-overlap", "chunked-pages", "device-planner")
def test_requests_join_and_others_are_aborted(server: Server, reference) -> None:
    """Two of four streams are cut off; two requests join while the others decode."""
    first = [Ask(PREFIX + f"Then came {topic},", tokens=14) for topic in TOPICS[:4]]
    later = [Ask(PREFIX + f"Then came {topic}, and", tokens=8) for topic in TOPICS[:2]]

    async def traffic() -> tuple[list[list[Answer]], list[list[Answer]]]:
        async with server.client() as client:
            begun = asyncio.Event()

            async def abandon(ask: Ask) -> None:
                stream = await client.completions.create(
                    model="default", prompt=ask.prompt, max_tokens=200, temperature=0,
                    stream=True, extra_body={"ignore_eos": True},
                )  # fmt: skip
                seen = 0
                async for _ in stream:
                    seen += 1
                    begun.set()
                    if seen == 4:
                        break
                await stream.close()

            async def join(ask: Ask) -> list[Answer]:
                await begun.wait()
                return await complete(client, ask)

            kept = [asyncio.create_task(complete(client, ask)) for ask in first[:2]]
            joined = [asyncio.create_task(join(ask)) for ask in later]
            await asyncio.gather(*(abandon(ask) for ask in first[2:]))
            return list(await asyncio.gather(*kept)), list(await asyncio.gather(*joined))

    kept, joined = asyncio.run(traffic())
    assert_same(first[:2], kept, reference.answers(first[:2]))
    assert_same(later, joined, reference.answers(later))
    again = [Ask(PREFIX + f"Afterwards, {topic}") for topic in TOPICS[:3]]
    check(server, reference, again)


@on("retracting")
def test_retracted_requests_come_back(server: Server, reference) -> None:
    """The host takes requests back while they decode, and prefills them anew later."""
    asks = [Ask(PREFIX + f"Tell of {topic}:", tokens=20) for topic in TOPICS]
    check(server, reference, asks)
    retracted = re.findall(r"#retracted_reqs: (\d+)", server.log)
    assert sum(map(int, retracted)) >= 2
    assert server.state()["steps_tree"] > 0


@on("default", "no-overlap", "chunked-pages")
def test_fewer_bytes_are_read(server: Server, reference) -> None:
    """A shared batch goes through tree attention and reads less than request by request."""
    before = server.state() if server.process.pid and _has_state(server) else None
    asks = [Ask(PREFIX + f"Of {topic} it is told", tokens=10) for topic in TOPICS]
    check(server, reference, asks)
    after = server.state()
    read, guided, steps = (
        after[name] - (before[name] if before else 0)
        for name in ("kv_bytes_read", "kv_bytes_query_guided", "steps_tree")
    )
    # How much less depends on when the requests meet, which is the machine's affair.
    assert steps > 0
    assert 0 < read < guided
    assert after["backend"] == "deft"
    assert after["decode_steps"] == after["steps_tree"] + sum(after["steps_host"].values())
    # The plan is made when the batch changes, not in every step.
    assert 0 < after["plans"] < after["steps_tree"]
    forest = after["forest"]
    assert len(forest["rids"]) == len(forest["order"]) == len(forest["leaf"])


def _has_state(server: Server) -> bool:
    try:
        server.state()
    except FileNotFoundError:
        return False
    return True


@on("device-planner")
def test_the_device_plans_every_step(server: Server, reference) -> None:
    """Requests that share, loners, and some that the host takes back and prefills anew."""
    asks = [Ask(PREFIX + f"Say of {topic}:", tokens=16) for topic in TOPICS[:4]]
    check(server, reference, [*asks, Ask("Once upon a time", tokens=16)])
    state = server.state()
    assert state["steps_tree"] > 0
    assert not state["steps_host"]
    assert state["plans"] == state["steps_tree"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    assert "planned on the device" in server.log


@on("no-radix")
def test_without_a_radix_tree_the_kernels_still_run(server: Server, reference) -> None:
    """Nothing is shared then: every request is a leaf, and the answers are the same."""
    check(server, reference, [Ask(PREFIX + topic) for topic in TOPICS[:3]])
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["kv_bytes_read"] == state["kv_bytes_query_guided"]

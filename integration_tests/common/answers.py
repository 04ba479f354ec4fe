"""Compare answers with the reference's, and send the traffic for them."""

import asyncio

import pytest

from integration_tests.common.server import POLICY_GROUPS, complete
from integration_tests.hosts import HOST

TOPICS = ("the harbour", "an old map", "seven lamps", "the northern road", "a grey cat", "salt")
PREFIX = (
    "The library stood at the corner of two narrow streets, and every evening its keeper lit the "
    "lamps, counted the readers, closed the shutters one by one, and wrote a short line into the "
    "long book of days. "
)


def on(*groups, sglang=(), vllm=(), smoke=(), rare=()):
    """Run the test on a server of each of these groups, and of each of the installed host's.

    The groups in `smoke` are also in the smoke suite; those in `rare` are left out by default.

    Two processes of ``pytest -n 2 --dist loadgroup`` share the groups. Each group's server starts
    once, in one of the processes.
    """
    chosen = []
    for group in (*groups, *{"sglang": sglang, "vllm": vllm}[HOST]):
        marks = [pytest.mark.xdist_group(process_of(group))]
        if group in smoke:
            marks.append(pytest.mark.smoke)
        if group in rare:
            marks.append(pytest.mark.rare)
        chosen.append(pytest.param(group, marks=marks))
    return pytest.mark.parametrize("server", chosen, indirect=True)


def only(host):
    return pytest.mark.skipif(host != HOST, reason=f"of {host} alone")


def process_of(group):
    """Groups that need the baseline as well share a process, so that the baseline starts once."""
    return "baseline" if group in ("default", "policy-fasttree") else group


RARE_POLICIES = tuple(group for group in POLICY_GROUPS if group != "policy-fasttree")


def assert_same(asks, found, expected, *, gaps=False):
    """Check that every choice equals the reference's, token by token, with its log-probabilities.

    With `gaps` the lists of tokens may lack some tokens, but the text may not: see
    `Server.loses_logprobs`.
    """
    for ask, ours, theirs in zip(asks, found, expected, strict=True):
        assert len(ours) == len(theirs) == ask.choices
        for a, b in zip(ours, theirs, strict=True):
            assert a.text == b.text, f"after {ask.prompt[-40:]!r}"
            assert a.finish == b.finish in ("length", "stop")
            if not ask.logprobs:
                continue  # the text has every token
            tokens, other_tokens = _tokens(a), _tokens(b)
            if a.finish == "stop":  # some lists hold the token that ends an answer
                tokens = tokens[: len(other_tokens)]
            if gaps:
                other_tokens = _those_in(tokens, other_tokens)
            assert [t[0] for t in tokens] == [t[0] for t in other_tokens], ask.prompt[-40:]
            for (_, logprob, top), (_, other_logprob, other) in zip(
                tokens, other_tokens, strict=True
            ):
                assert logprob == pytest.approx(other_logprob, abs=1e-3)
                # Of tokens that tie at the end of the list, either may be missing.
                common = top.keys() & other.keys()
                assert len(common) >= len(other) - 1
                assert [top[t] for t in common] == pytest.approx(
                    [other[t] for t in common], abs=1e-3
                )


def _tokens(answer):
    """Text, log-probability and likeliest tokens at each position."""
    return list(zip(answer.token_texts, answer.logprobs, answer.likeliest, strict=True))


def _those_in(tokens, expected):
    """The expected tokens that `tokens` lists, in order; at most two may be missing."""
    found, rest = [], iter(expected)
    for text, logprob, _ in tokens:
        found += [next((t for t in rest if t[0] == text and abs(t[1] - logprob) < 1e-3), None)]
    assert None not in found
    assert len(tokens) >= len(expected) - 2
    return [t for t in found if t is not None]


def check(server, reference, asks):
    """Send all requests at once and compare; returns the answers."""
    found = server.complete(asks)
    assert_same(asks, found, reference.answers(asks), gaps=server.loses_logprobs)
    assert not server.trouble()
    return found


def check_joins_and_aborts(server, reference, *, kept, cut, later):
    """Cut off some requests after a few tokens; let others join while the rest decode."""

    async def traffic():
        async with server.client() as client:
            begun = asyncio.Event()

            async def abandon(ask):
                given = {"max_tokens": 200, "stream": True}
                await complete(client, ask, begun=begun, leave_after=4, **given)

            async def join(ask):
                await begun.wait()
                return await complete(client, ask)

            staying = [asyncio.create_task(complete(client, ask)) for ask in kept]
            joining = [asyncio.create_task(join(ask)) for ask in later]
            await asyncio.gather(*(abandon(ask) for ask in cut))
            return list(await asyncio.gather(*staying)), list(await asyncio.gather(*joining))

    stayed, joined = asyncio.run(traffic())
    for asks, found in ((kept, stayed), (later, joined)):
        assert_same(asks, found, reference.answers(asks), gaps=server.loses_logprobs)
    assert not server.trouble()

"""Traffic of the `openai` package against a disturbed server and against the host's own backend."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import openai

from integration_tests.common.answers import assert_same
from integration_tests.common.control import until
from integration_tests.common.server import REQUEST_SECONDS, Answer, Ask, Reference, complete

_NOTE = (
    "The town of {town} stands on the river {river}. Its ruler is King {king}. "
    "The people of {town} sell salt and eat rye bread. The code of BADGER is 3692. "
    "The code of EMBER is 5814. Once there was an owl who lived on the hill. The owl was kind. "
    "One day the owl found a ring. Soon a wolf came by and said, 'Give me the ring.' "
    "The kind owl gave it away and gained a friend."
)
_PREFIXES = tuple(
    _NOTE.format(town=town, river=river, king=king)
    for town, river, king in (
        ("Belmora", "Isk", "Odo"),
        ("Elstow", "Brill", "Pell"),
        ("Ivarra", "Marl", "Bram"),
    )
)
"""About 370 tokens each: together with the requests' own, more than the servers' caches hold."""

_QUESTIONS = (
    "Tell me a story about a fox.",
    "How do I make tea?",
    "Tell me a story about a goat.",
    "Count from 10 to 18.",
    "Tell me a story about a lion.",
    "What is the code of EMBER?",
    "Tell me a story about a hare.",
    "How do I bake bread?",
    "Tell me a story about a stork.",
    "Which river runs by Belmora?",
    "Tell me a story about a wolf.",
)
"""What the tiny model knows: its answers are long, and clear of ties."""

_LENGTHS = (6, 24, 10, 18, 13)
_FORMS = tuple(itertools.product((False, True), (False, True), (1, 4)))
"""Chat, stream and choices."""

_LEFT_LENGTH, _LEFT_AFTER = 60, 6
"""Tokens of a stream that its client closes, and chunks after which it does so."""

_TIMES = 3
"""How often a round disturbs the server at most; each time costs the host work."""


@dataclass(frozen=True)
class Round:
    """What happens to a server while requests are in flight."""

    act: Callable[[], None]
    """Called while answers come, :data:`_TIMES` times unless they end before."""
    aborts: bool = False
    """Whether `act` aborts what is in flight. It is called once then, when a quarter of the
    requests have their answers, and other answers may be cut off."""


def check_openai_client(server, own, rounds):
    """Compare each answer of the `openai` package with the host's own; returns how many were whole.

    Each round sends requests of every form at once, behind a few long prefixes. Some clients leave
    in the middle of a stream. After each round the cache is flushed.

    Parameters
    ----------
    server : Server
        The server with tree attention; its cache must be too small for a round.
    own : Server
        The server with the host's own backend. It answers the same requests undisturbed.
    rounds : sequence of Round
    """
    whole, parts = 0, 0
    reference = Reference(own)
    for number, each in enumerate(rounds):
        kept, left = _kept(number), _left(number)
        expected = reference.answers([*kept, *left])
        before = server.state()
        found = asyncio.run(_disturbed(server, kept, left, each))
        for call, ours, theirs in zip([*kept, *left], found, expected, strict=True):
            if _is_part(call, ours, theirs, each.aborts or call in left):
                parts += len(ours)
            else:
                whole += len(ours)
        _check_steps(before, server.state())
        assert not server.trouble()
        until(server.flush)
    assert parts > 0, "no answer was cut off"
    return whole


def _kept(number):
    """Two requests of every form, of different lengths, dealt out to the prefixes."""
    prefixes, lengths = itertools.cycle(_PREFIXES), itertools.cycle(_LENGTHS)
    questions = itertools.islice(itertools.cycle(_QUESTIONS), number, None)
    return [
        _call(next(prefixes), next(questions), next(lengths), n, chat, stream)
        for chat, stream, n in 2 * _FORMS
    ]


def _left(number):
    """Streams that the client closes: completions and chats, of one choice and of several."""
    forms = [(chat, n) for chat, stream, n in _FORMS if stream]
    question = _QUESTIONS[2 * number]
    return [
        _call(prefix, question, _LEFT_LENGTH, n, chat, stream=True)
        for prefix, (chat, n) in zip(itertools.cycle(_PREFIXES), forms)
    ]


def _call(prefix, question, tokens, n, chat, stream):
    """A greedy request behind a text that others share."""
    if chat:
        return Ask(question, tokens, n, system=prefix, stream=stream)
    return Ask(f"{prefix}\n\n{question}", tokens, n, stream=stream)


async def _disturbed(server, kept, left, each):
    """Answers of the requests that stay, and the parts that came for clients that left."""
    begun = asyncio.Event()
    async with server.client() as client:

        async def sent(call, leave_after=None):
            try:
                return await complete(client, call, begun=begun, leave_after=leave_after)
            except openai.APIError:
                # The host aborts running requests, and refuses waiting ones.
                if not each.aborts:
                    raise
                return [Answer("", "abort", (), (), ())] * call.n

        staying = [asyncio.create_task(sent(call)) for call in kept]
        leaving = [asyncio.create_task(sent(call, _LEFT_AFTER)) for call in left]
        await asyncio.wait_for(begun.wait(), REQUEST_SECONDS)
        if each.aborts:
            await _first(len(staying) // 4, staying)
        assert not all(task.done() for task in staying), "nothing is in flight"
        for _ in range(1 if each.aborts else _TIMES):
            await asyncio.to_thread(each.act)
            done, _ = await asyncio.wait(staying, timeout=1)
            if len(done) == len(staying):
                break
        return list(await asyncio.gather(*staying, *leaving))


async def _first(number, tasks):
    """Wait until so many tasks have ended."""
    pending = set(tasks)
    while len(tasks) - len(pending) < number:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def _is_part(call, ours, theirs, may_be_cut):
    """Whether an answer was cut off and began as the host's own did; others must equal that."""
    if may_be_cut and any(a.finish not in ("length", "stop") for a in ours):
        for a, b in zip(ours, theirs, strict=True):
            assert b.text.startswith(a.text), call
        return True
    assert_same([call], [ours], [theirs])
    return False


def _check_steps(before, after):
    """Check that tree attention decoded in a round, and read shared KV once."""
    steps, read, guided = (
        after[name] - before[name]
        for name in ("steps_tree", "kv_bytes_read", "kv_bytes_query_guided")
    )
    assert steps > 0
    assert 0 < read < guided

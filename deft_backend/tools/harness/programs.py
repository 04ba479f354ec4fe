"""Batches on trees of prefixes and FastTree's programs, with prompts of text or of token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from deft_backend.tools.harness.workload import Request, Workload


class Sizes(NamedTuple):
    """Tokens of the shared prefix, requests (beams, samples, sessions), and tokens behind it."""

    prefix: int
    branches: int
    suffix: int


class Parts(NamedTuple):
    """Each makes a new part of a prompt, of about so many tokens: text or token ids."""

    shared: Callable[[int], Any]
    own: Callable[[int], Any]  # behind the shared parts


Make = Callable[[Sizes, int, Parts], Workload]
"""Makes the requests for sizes, output tokens, and the parts of prompts."""

MARK = 2
"""Tokens that make a thought differ from its siblings. Without them, greedy decoding would give all
of them the same answer."""

CHAINS = 4
"""Chains of reasoning of a question."""


def levels(
    sizes: Sizes, gen: int, parts: Parts, nodes: Sequence[tuple[int, int]] = ((1, 1),)
) -> Workload:
    """Branches on a tree of prefixes, one by default; with a prefix of 0 they share nothing.

    `nodes` are those of each level, spread evenly over the level above, and how the prefix's tokens
    divide among the levels.
    """
    whole = sum(share for _, share in nodes)
    prefixes = [parts.shared(0)]
    for count, share in nodes:
        tokens = sizes.prefix * share // whole
        above = [prefixes[at * len(prefixes) // count] for at in range(count)]
        prefixes = [prefix + parts.shared(tokens) for prefix in above]
    return _branches(prefixes, sizes, gen, parts)


def retrieved(sizes: Sizes, gen: int, parts: Parts) -> Workload:
    """Eight questions about each choice of 4 of 17 documents."""
    texts = [parts.shared(sizes.prefix // 4) for _ in range(17)]
    chance = random.Random(f"retrieved {sizes}")
    chosen = [sorted(chance.sample(range(17), 4)) for _ in range(max(1, sizes.branches // 8))]
    prefixes = [texts[a] + texts[b] + texts[c] + texts[d] for a, b, c, d in chosen]
    return _branches(prefixes, sizes, gen, parts)


def _branches(prefixes: Sequence[Any], sizes: Sizes, gen: int, parts: Parts) -> Workload:
    """Requests behind the prefixes, which take turns, as in real traffic."""
    requests = tuple(
        Request(f"branch {at}", prefixes[at % len(prefixes)] + parts.own(sizes.suffix), gen)
        for at in range(sizes.branches)
    )
    return Workload("few-shot", "", tuple(filter(None, prefixes)), requests)


def chains(sizes: Sizes, gen: int, parts: Parts) -> Workload:
    """Questions behind one prompt, each with chains of reasoning and a vote on their answers.

    The vote goes on behind the first chain, with what the others return.
    """
    prompt = parts.shared(sizes.prefix)
    requests: list[Request] = []
    for question in range(sizes.branches):
        asked = prompt + parts.own(sizes.suffix)
        names = [f"question {question}, chain {chain}" for chain in range(CHAINS)]
        requests += [Request(name, asked + parts.own(MARK), gen) for name in names]
        vote, others = parts.own(sizes.suffix), tuple(names[1:])
        requests.append(Request(f"question {question}, vote", vote, gen, names[0], returned=others))
    return Workload("chains", "", (prompt,), tuple(requests))


PROGRAMS: Mapping[str, tuple[Make, Sizes]] = {
    # One template, three places, four languages; then eight sets of examples behind one prompt.
    "system-prompts": (partial(levels, nodes=((1, 45), (3, 355), (4, 2200))), Sizes(2600, 512, 60)),
    "shots": (partial(levels, nodes=((1, 2600), (8, 3500))), Sizes(6100, 128, 60)),
    "chains": (chains, Sizes(2600, 32, 60)),
    "retrieved": (retrieved, Sizes(4400, 128, 40)),
}
"""FastTree's, with about the tokens that Llama-2's and Mistral's tokenizers make of them."""

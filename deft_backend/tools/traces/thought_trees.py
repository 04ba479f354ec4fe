"""Trees of thoughts as data, and a search's tree of any shape."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deft_backend.tools.traces.invented import passage

ROOT = 0  # id of the node that holds the prompt


@dataclass(frozen=True)
class Thought:
    """A node: ``tokens`` tokens, decoded at iterations ``start`` to ``end``, both included."""

    id: int
    tokens: int
    start: int
    end: int
    children: tuple[int, ...]


@dataclass(frozen=True)
class ThoughtTree:
    prompt: str
    nodes: Mapping[int, Thought]

    @property
    def last_iteration(self) -> int:
        return max((node.end for node in self.nodes.values()), default=0)


def lay_out(
    lengths: Mapping[int, int], children: Mapping[int, Sequence[int]]
) -> dict[int, Thought]:
    """Build nodes from lengths and children: a child starts right after its parent's end."""
    nodes: dict[int, Thought] = {}
    stack = [(ROOT, 1 - lengths[ROOT])] if lengths else []
    while stack:
        node, start = stack.pop()
        end = start + lengths[node] - 1
        nodes[node] = Thought(node, lengths[node], start, end, tuple(children[node]))
        stack.extend((child, end + 1) for child in reversed(children[node]))
    return nodes


def generate_thought_tree(
    seed: int = 0,
    *,
    depth: int = 3,
    width: int,
    keep: int,
    prompt_tokens: int,
    shortest: int,
    longest: int,
    characters_a_token: float,
) -> ThoughtTree:
    """The tree of a breadth-first search over `depth` levels; a seed gives the same everywhere.

    Below each of the `keep` thoughts that the search expands in a level, it proposes `width`, of
    `shortest` to `longest` tokens. The prompt's text has about `prompt_tokens` tokens.
    """
    chance = random.Random(seed)
    lengths = {ROOT: prompt_tokens}
    children: dict[int, list[int]] = {ROOT: []}
    kept = [ROOT]
    for _ in range(depth):
        proposed: list[int] = []
        for parent in kept:
            for _ in range(width):
                node = len(lengths)
                lengths[node] = chance.randint(shortest, longest)
                children[node] = []
                children[parent].append(node)
                proposed.append(node)
        kept = sorted(chance.sample(proposed, min(keep, len(proposed))))
    characters = max(1, round(prompt_tokens * characters_a_token))
    return ThoughtTree(passage(characters, seed), lay_out(lengths, children))

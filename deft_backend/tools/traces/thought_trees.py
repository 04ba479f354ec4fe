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


@dataclass(frozen=True)
class ThoughtTreeShape:
    """The shape of a breadth-first search that keeps the best thoughts of every level."""

    depth: int = 3  # Levels of thoughts
    width: int = 4  # Thoughts proposed below each kept thought
    keep: int = 1  # Thoughts of a level that the search expands; it prunes the others when they end
    prompt_tokens: int = 400  # tokens of the prompt
    # Least and most tokens of a thought; all lengths in between are equally likely.
    shortest: int = 8
    longest: int = 24
    # Characters of a token, so that the prompt's text has about `prompt_tokens` tokens; 1 for
    # byte-level tokenizers.
    characters_a_token: float = 1.0


def generate_thought_tree(shape: ThoughtTreeShape, seed: int = 0) -> ThoughtTree:
    """A tree of thoughts of this shape; a seed gives the same tree everywhere."""
    chance = random.Random(seed)
    lengths = {ROOT: shape.prompt_tokens}
    children: dict[int, list[int]] = {ROOT: []}
    kept = [ROOT]
    for _ in range(shape.depth):
        proposed: list[int] = []
        for parent in kept:
            for _ in range(shape.width):
                node = len(lengths)
                lengths[node] = chance.randint(shape.shortest, shape.longest)
                children[node] = []
                children[parent].append(node)
                proposed.append(node)
        kept = sorted(chance.sample(proposed, min(shape.keep, len(proposed))))
    characters = max(1, round(shape.prompt_tokens * shape.characters_a_token))
    return ThoughtTree(passage(characters, seed), lay_out(lengths, children))

"""Recorded trees as data: trees of thoughts, and the token trees of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = 0  # id of the node that holds the prompt

MOST_TOKENS = 10**7  # of any text in a trace


class TraceError(ValueError):
    """The trace file is wrong; the message names the file, the tree, the node and the field."""


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
    """A recorded tree of thoughts. A tree recorded as incomplete may have no nodes at all."""

    prompt: str
    incomplete: bool
    nodes: Mapping[int, Thought]

    @cached_property
    def parent(self) -> dict[int, int]:
        return {child: node.id for node in self.nodes.values() for child in node.children}

    @property
    def last_iteration(self) -> int:
        return max((node.end for node in self.nodes.values()), default=0)

    def path(self, node: int) -> list[int]:
        nodes = [node]
        while nodes[-1] != ROOT:
            nodes.append(self.parent[nodes[-1]])
        return nodes[::-1]

    def live(self, iteration: int) -> list[Thought]:
        order: list[Thought] = []
        stack = [ROOT] if self.nodes else []
        while stack:
            node = self.nodes[stack.pop()]
            if node.tokens and node.start <= iteration <= node.end:
                order.append(node)
            stack.extend(reversed(node.children))
        return order


@dataclass(frozen=True)
class TokenTree:
    """A Medusa token tree and the tokens that each step of a recording accepted.

    ``paths`` hold, for each candidate token, the choices from the root to it. The root is the last
    accepted token. A candidate's parent has the same path without the last choice.
    """

    paths: tuple[tuple[int, ...], ...]
    prompts: tuple[str, ...]
    accepted: tuple[tuple[int, ...], ...]

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each query token. Token 0 is the last accepted one, with parent -1.

        >>> TokenTree(((0,), (1,), (0, 0)), (), ()).parents
        (-1, 0, 0, 1)
        """
        number = {(): 0, **{path: i + 1 for i, path in enumerate(self.paths)}}
        return (-1, *(number[path[:-1]] for path in self.paths))


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

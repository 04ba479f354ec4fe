"""Forests to measure, as workloads and cases."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from deft_backend.forest import PrefixForest, forest_from_paths
from deft_backend.tools.traces.tree_forests import forest_from_levels

TRACES = "traces"
"""The set that comes from recordings instead of the data file."""

VERIFY = "verify"
"""The set of requests of several query tokens."""

QUICK_TREES = 2
"""Trees of each set in a quick run."""

_PAGE = 16


class WorkloadChoiceError(ValueError):
    """The set is unknown or the head shape is impossible; the message says what is expected."""


@dataclass(frozen=True)
class Workload:
    """A forest to measure.

    - `set, name`: its set, and its name in the set.
    - `describe`: makes the forest, with a page size of 1.
    - `page_size`: tokens per page; None takes 16 if all nodes are whole pages of 16 tokens,
      otherwise 1.
    - `query_tokens`: query tokens of each request, its last tokens.
    - `parents`: the parent of each query token, -1 for the root of a token tree; None: they are a
      chain.
    """

    set: str
    name: str
    describe: Callable[[], PrefixForest] = field(repr=False, compare=False)
    page_size: int | None = None
    query_tokens: int = 1
    parents: tuple[int, ...] | None = field(default=None, repr=False)

    @cached_property
    def forest(self) -> PrefixForest:
        return self.describe()

    def tokens_a_page(self) -> int:
        """The default page size of the workload."""
        if self.page_size is not None:
            return self.page_size
        return 1 if (self.forest.length % _PAGE).any() else _PAGE


@dataclass(frozen=True)
class Case:
    """A workload with one head shape: it makes one row."""

    workload: Workload
    query_heads: int
    kv_heads: int
    page_size: int

    @property
    def heads(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}"


def described(tree: str) -> Workload:
    """The user's own tree: ``nodes per level  tokens per node at each level``.

    - `TraceError`: if the description cannot be read.
    """
    made = Workload("own", tree, partial(forest_from_levels, tree))
    made.forest  # noqa: B018 - refuse a bad description before anything is measured
    return made


def cases_of(
    chosen: Sequence[Workload], heads: Sequence[tuple[int, int]], page_size: int
) -> list[Case]:
    """Each workload with each head shape; a `page_size` of 0 takes the workload's own."""
    return [
        Case(workload, query_heads, kv_heads, page_size or workload.tokens_a_page())
        for workload in chosen
        for query_heads, kv_heads in heads
    ]


def quick(chosen: Sequence[Workload]) -> list[Workload]:
    """The first few workloads of each set."""
    kept: dict[str, list[Workload]] = {}
    for workload in chosen:
        kept.setdefault(workload.set, []).append(workload)
    return [workload for found in kept.values() for workload in found[:QUICK_TREES]]


def parse_heads(text: str) -> tuple[int, int]:
    """``32/8`` as (query heads, KV heads).

    - `WorkloadChoiceError`: if the text is no such pair, or the first is no multiple of the second.
    """
    try:
        query_heads, kv_heads = (int(part) for part in text.split("/"))
        if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
            raise ValueError
    except ValueError:
        raise WorkloadChoiceError(
            f"heads is {text!r}; expected QUERY/KV such as 32/8, the first a multiple of the "
            "second, several separated by commas"
        ) from None
    return query_heads, kv_heads


def forest_from_parents(parents: Sequence[int], tokens: Sequence[int]) -> PrefixForest:
    """A forest from the nodes' parents (-1: a root). Parents come first; leaves are requests."""
    childless = sorted(set(range(len(parents))) - set(parents))
    paths: list[list[tuple[Hashable, int]]] = []
    for leaf in childless:
        path: list[tuple[Hashable, int]] = []
        node = leaf
        while node != -1:
            path.append((node, tokens[node]))
            node = parents[node]
        paths.append(path[::-1])
    return forest_from_paths(paths, [sum(n for _, n in path) for path in paths])

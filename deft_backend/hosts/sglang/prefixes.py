"""What the requests of a batch share, read by the CPU from SGLang's radix trees before a step. A
path is cut to what the tree owns of the request, and to ``seq_len - 1`` tokens. A cut node differs
from the whole node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_tree
from deft_backend.hosts.sglang.versions import TreePaths, place_of, tree_paths

logger = logging.getLogger("deft_backend")

Key = tuple[Any, ...]
"""Id of a request, its row of the page table, its tree node, and its tokens that the tree owns.

If the keys are equal and in the same order, the batch has the same requests and shares no less than
before. Ids are unique among live requests only, so code that keeps keys must also keep the
requests."""

ROOT = 0  # the root among the nodes that a reader has seen


class TreeError(ValueError):
    """A radix tree with an unexpected structure."""


class RadixTreeSource:
    """Walks from each request's last node to the root, by the nodes' ``parent`` and ``key``."""

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        tree = _Tree()
        holder = []
        for request, length in zip(requests, seq_lens.tolist(), strict=True):
            node, shared = _held(request, length)
            if shared <= 0:
                holder.append(ROOT)
                continue
            end = tree.index.get(node.id)
            if end is None:
                end = tree.add(node)
            holder.append(end if tree.depth[end] <= shared else tree.cut(end, shared))
        return forest_from_tree(tree.parent, tree.depth, holder, seq_lens)


class _Tree:
    """The part of the host's tree that a batch holds: host node id → ours, parents, depths."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self.parent = [ROOT]
        self.depth = [0]
        self._cuts: dict[tuple[int, int], int] = {}

    def add(self, node: Any) -> int:
        unknown = []
        while node.parent is not None and node.id not in self.index:
            unknown.append(node)
            node = node.parent
        above = self.index.setdefault(node.id, ROOT)
        for node in reversed(unknown):
            tokens = len(node.key)
            if tokens <= 0:
                raise TreeError(f"node {node.id} of the radix tree holds {tokens} tokens")
            above = self.index[node.id] = self._append(above, self.depth[above] + tokens)
        return above

    def cut(self, end: int, shared: int) -> int:
        while self.depth[self.parent[end]] >= shared:
            end = self.parent[end]
        if self.depth[end] == shared:
            return end
        part = self._cuts.get((end, shared))
        if part is None:
            part = self._cuts[end, shared] = self._append(self.parent[end], shared)
        return part

    def _append(self, parent: int, depth: int) -> int:
        self.parent.append(parent)
        self.depth.append(depth)
        return len(self.parent) - 1


class UnifiedTreeSource:
    def __init__(self, paths: TreePaths) -> None:
        self._paths = paths

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        held = [_held(*pair) for pair in zip(requests, seq_lens.tolist(), strict=True)]
        ends = list({node: None for node, _ in held if node is not None})
        paths = dict(zip(ends, self._paths(ends) if ends else (), strict=True))
        parent, depth = [ROOT], [0]
        index: dict[tuple[int, int], int] = {}
        holder = []
        for end, shared in held:
            node = ROOT
            for part in paths[end] if shared > 0 else ():
                if part.path_start >= shared:
                    break
                _check(part, depth[node])
                until = min(part.path_end, shared)
                key = (part.node_id, until)
                below = index.get(key)
                if below is None:
                    below = index[key] = len(parent)
                    parent.append(node)
                    depth.append(until)
                node = below
            holder.append(node)
        return forest_from_tree(parent, depth, holder, seq_lens)


def _held(request: Any, length: int) -> tuple[Any, int]:
    """The node at the end of a request's path, and the tokens of the path that it may share.

    Without a tree, or after the host has released the request, there are none.
    """
    row, owned = place_of(request)
    if request.last_node is None or row is None:
        return None, 0
    return request.last_node, min(owned, length - 1)


def _check(part: Any, start: int) -> None:
    if part.path_start != start:
        raise TreeError(
            f"node {part.node_id} of the radix tree starts at token {part.path_start}, its parent "
            f"ends at {start}"
        )
    tokens = part.path_end - start
    if part.full_value_len != tokens:
        raise TreeError(
            f"node {part.node_id} of the radix tree has {part.full_value_len} of its {tokens} "
            "tokens on the device"
        )


TreeReader = RadixTreeSource | UnifiedTreeSource


def tree_reader(tree_cache: Any, *, bigrams: bool = False) -> TreeReader | None:
    """The reader for a prefix cache; None if only the page table shows the sharing. Nodes of other
    caches may hold tokens outside the page table's pages. A tree of bigrams, whose keys are a token
    shorter than their text, is read with `bigrams` alone.
    """
    kind = type(tree_cache)
    name = f"{kind.__module__}.{kind.__qualname__}"
    plain = name == "sglang.srt.mem_cache.radix_cache.RadixCache"
    if name == "sglang.srt.mem_cache.chunk_cache.ChunkCache" or (  # no caching, to 0.5.21
        plain and (bigrams or not getattr(tree_cache, "is_eagle", False))
    ):
        return RadixTreeSource()
    if name == "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache":
        paths = tree_paths(tree_cache, bigrams=bigrams)
        return None if paths is None else UnifiedTreeSource(paths)
    return None


class CachedTree:
    """The tree of the host's prefix cache; `otherwise` says what happens if it cannot be read."""

    def __init__(self, otherwise: str, *, bigrams: bool = False) -> None:
        self._otherwise, self._bigrams = otherwise, bigrams
        self._tree_cache: Any = None
        self._tree: TreeReader | None = None

    def forest(
        self, tree_cache: Any, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]
    ) -> PrefixForest | None:
        kind = type(tree_cache).__qualname__
        if tree_cache is not self._tree_cache:
            self._tree_cache = tree_cache
            self._tree = tree_reader(tree_cache, bigrams=self._bigrams)
            if self._tree is None:
                logger.info(
                    "deft: the prefix cache %s has no tree that the plugin reads; %s",
                    kind,
                    self._otherwise,
                )
        if self._tree is None:
            return None
        try:
            return self._tree.forest(requests, seq_lens)
        except Exception as error:
            self._tree = None  # permanently: the next batch would fail in the same way
            logger.warning(
                "deft: the tree of the prefix cache %s cannot be read (%r); from now on, %s",
                kind,
                error,
                self._otherwise,
            )
            return None


def key_of(request: Any) -> Key:
    row, owned = place_of(request)
    return (id(request), row, request.last_node, owned)


@dataclass(frozen=True, eq=False)
class Observed:
    rids: Any  # the forward batch's own list of request ids; its identity names the batch
    requests: Sequence[Any]
    tree_cache: Any
    decoding: int = 0  # in a mixed batch, the requests that decode: the last ones


class BatchObserver:
    """Remembers the last batch of one model runner that the host made from its requests."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._last: Observed | None = None

    def observe(self, forward_batch: Any, batch: Any, runner: Any) -> None:
        if runner is self._runner:
            mixed = forward_batch.forward_mode.is_mixed()
            decoding = len(batch.decoding_reqs or ()) if mixed else 0
            self._last = Observed(forward_batch.rids, batch.reqs, batch.tree_cache, decoding)

    def of(self, forward_batch: Any) -> Observed | None:
        """Requests and tree of `forward_batch`; None if another was observed last."""
        last = self._last
        if last is None or last.rids is None or last.rids is not forward_batch.rids:
            return None
        return last

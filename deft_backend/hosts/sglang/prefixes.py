"""What the requests of a batch share, read by the CPU from SGLang's radix trees before a step. A
path is cut to what the tree owns of the request, and to ``seq_len - 1`` tokens. A cut node differs
from the whole node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_paths
from deft_backend.hosts.sglang.versions import place_of

logger = logging.getLogger("deft_backend")


class TreeError(ValueError):
    """A radix tree with an unexpected structure."""


class PathNode(NamedTuple):
    """A tree node on a request's path, by the names of SGLang from 0.5.22 on."""

    node_id: Any
    path_start: int
    path_end: int
    full_value_len: int  # tokens on the device


TreePaths = Callable[[Sequence[Any]], Sequence[Sequence[Any]]]
"""From the last nodes of requests to the nodes of each path, without the root."""


def walk_paths(ends: Sequence[Any]) -> list[list[PathNode]]:
    """Paths by the nodes' ``parent`` and ``key``, in the trees of SGLang to 0.5.21."""
    paths = []
    for end in ends:
        nodes, path, start = [end], [], 0
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        for node in reversed(nodes[:-1]):
            tokens = len(node.key)
            path.append(PathNode(node.id, start, start + tokens, tokens))
            start += tokens
        paths.append(path)
    return paths


def forest_of_paths(
    paths_of: TreePaths, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]
) -> PrefixForest:
    """Raises TreeError for a path with gaps, or with tokens that are not on the device."""
    held = [_held(*pair) for pair in zip(requests, seq_lens.tolist(), strict=True)]
    ends = list({node: None for node, _ in held if node is not None})
    paths = dict(zip(ends, paths_of(ends) if ends else (), strict=True))
    cut = []
    for end, shared in held:
        path: list[tuple[Hashable, int]] = []
        start = 0
        for part in paths[end] if shared > 0 else ():
            if part.path_start >= shared:
                break
            _check(part, start)
            until = min(part.path_end, shared)
            path.append(((part.node_id, until), until - start))
            start = until
        cut.append(path)
    return forest_from_paths(cut, seq_lens)


def _held(request: Any, length: int) -> tuple[Any, int]:
    """The node at the end of a request's path, and the tokens of the path that it may share.

    Without a tree, or after the host has released the request, there are none. A stand-in takes the
    node's place where a session holds the KV of earlier turns (``--enable-streaming-session``).
    """
    row, owned = place_of(request)
    stands_in = type(request.last_node).__name__ == "_VirtualNode"
    if request.last_node is None or row is None or stands_in:
        return None, 0
    return request.last_node, min(owned, length - 1)


def _check(part: Any, start: int) -> None:
    if part.path_start != start:
        raise TreeError(
            f"node {part.node_id} of the radix tree starts at token {part.path_start}, its parent "
            f"ends at {start}"
        )
    tokens = part.path_end - start
    if tokens <= 0 or part.full_value_len != tokens:
        raise TreeError(
            f"node {part.node_id} of the radix tree has {part.full_value_len} of its {tokens} "
            "tokens on the device"
        )


def tree_paths(tree_cache: Any, *, bigrams: bool = False) -> TreePaths | None:
    """What lists the paths of a prefix cache; None if only the page table shows the sharing. Nodes
    of other caches may hold tokens outside the page table's pages. A tree of bigrams, whose keys
    are a token shorter than their text, is read with `bigrams` alone.
    """
    kind = type(tree_cache)
    name = f"{kind.__module__.removeprefix('sglang.srt.mem_cache.')}.{kind.__qualname__}"
    if name == "unified_radix_cache.UnifiedRadixCache":
        core: Any = getattr(tree_cache, "tree_core", None)
        paths: TreePaths | None = getattr(core, "collect_path_info", None)  # from 0.5.22
        if paths is None or len(tree_cache.tree_components) != 1:
            return None
        return None if core.is_eagle and not bigrams else paths
    plain = name == "radix_cache.RadixCache"
    if plain and (bigrams or not getattr(tree_cache, "is_eagle", False)):
        return walk_paths
    return walk_paths if name == "chunk_cache.ChunkCache" else None  # no caching, to 0.5.21


class CachedTree:
    """The tree of the host's prefix cache; `otherwise` says what happens if it cannot be read."""

    def __init__(self, otherwise: str, *, bigrams: bool = False) -> None:
        self._otherwise, self._bigrams = otherwise, bigrams
        self._tree_cache: Any = None
        self._paths: TreePaths | None = None
        self._keys: list[Any] | None = None
        self._requests: list[Any] | None = None  # ids are unique among live requests only

    def changed(self, requests: Sequence[Any]) -> bool:
        """Whether these requests are others than in the last call, or share less."""
        keys = [(id(request), request.last_node, *place_of(request)) for request in requests]
        if keys == self._keys:
            return False
        self._keys, self._requests = keys, list(requests)
        return True

    def forest(
        self, tree_cache: Any, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]
    ) -> PrefixForest | None:
        kind = type(tree_cache).__qualname__
        if tree_cache is not self._tree_cache:
            self._tree_cache = tree_cache
            self._paths = tree_paths(tree_cache, bigrams=self._bigrams)
            if self._paths is None:
                logger.info(
                    "deft: the prefix cache %s has no tree that the plugin reads; %s",
                    kind,
                    self._otherwise,
                )
        if self._paths is None:
            return None
        try:
            return forest_of_paths(self._paths, requests, seq_lens)
        except Exception as error:
            self._paths = None  # permanently: the next batch would fail in the same way
            logger.warning(
                "deft: the tree of the prefix cache %s cannot be read (%r); from now on, %s",
                kind,
                error,
                self._otherwise,
            )
            return None


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
            decoding = getattr(batch, "decoding_reqs", None) or ()
            # With DP attention, a rank may prefill what it decodes if another has a prompt.
            if decoding is not batch.reqs and not forward_batch.forward_mode.is_mixed():
                decoding = ()
            self._last = Observed(forward_batch.rids, batch.reqs, batch.tree_cache, len(decoding))

    def of(self, forward_batch: Any) -> Observed | None:
        """Requests and tree of `forward_batch`; None if another was observed last."""
        last = self._last
        if last is None or last.rids is None or last.rids is not forward_batch.rids:
            return None
        return last

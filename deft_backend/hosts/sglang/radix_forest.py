"""The forest of a decode batch, read from the requests' nodes in SGLang's radix tree.

What may be trusted, and why it stays true while a plan is in use, is argued in
``docs/hosts-sglang.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_paths

Key = tuple[int, int]
"""(id of the last node, tokens the tree owns): with the same key a row keeps the same prefix."""

PRIVATE: Key = (-1, 0)
"""Key of a request that holds nothing of the tree."""


class TreeError(ValueError):
    """A radix tree that does not look as expected."""


def known_tree(tree_cache: Any) -> str | None:
    """Why the prefixes of requests under this cache cannot be read, or None.

    Only two classes are known: the plain radix tree, and the cache of servers without one. Others
    (hierarchical, sliding window, Mamba, sessions) keep nodes whose tokens are not all on the
    device, or not all valid.
    """
    kind = type(tree_cache)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "sglang.srt.mem_cache.chunk_cache.ChunkCache":
        return None
    if name != "sglang.srt.mem_cache.radix_cache.RadixCache":
        return f"prefixes under a {kind.__qualname__} cannot be read"
    if getattr(tree_cache, "is_eagle", False):
        return "prefixes under a radix tree of bigrams cannot be read"
    return None


def key_of(request: Any) -> Key:
    """What decides which prefix of the request others may share; see :data:`Key`."""
    node = request.last_node
    if node is None or request.req_pool_idx is None:  # no tree, or its KV was given back already
        return PRIVATE
    return (node.id, request.cache_protected_len)


def path_of(request: Any, seq_len: int) -> list[tuple[tuple[int, int], int]]:
    """Tree nodes that hold the head of a request's context, root first, as (identity, tokens).

    The path is cut to what the tree owns of the request, and to ``seq_len - 1`` tokens, so that
    the token being decoded is always private. A node that is cut is another node than the whole.

    Raises
    ------
    TreeError
        If a node has no tokens, or no way to the root.
    """
    if key_of(request) == PRIVATE:
        return []
    lengths = []
    node = request.last_node
    while node.parent is not None:
        tokens = len(node.key)
        if tokens <= 0:
            raise TreeError(f"node {node.id} of the radix tree holds {tokens} tokens")
        lengths.append((node.id, tokens))
        node = node.parent
    left = min(request.cache_protected_len, seq_len - 1)
    path = []
    for identity, tokens in reversed(lengths):
        kept = min(tokens, left)
        if kept <= 0:
            break
        path.append(((identity, kept), kept))
        left -= kept
    return path


def forest_of(requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
    """Forest of a decode batch.

    Parameters
    ----------
    requests : [B] of the host's requests
        In batch order.
    seq_lens : [B] int, on the host
        Tokens of each request, the one being decoded included.
    """
    lens = seq_lens.tolist()
    paths = [path_of(request, length) for request, length in zip(requests, lens, strict=True)]
    return forest_from_paths(paths, lens)

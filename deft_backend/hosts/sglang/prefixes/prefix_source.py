"""Choose the source of a decode batch's forest: the host's prefix cache, or its page table.

``docs/hosts-sglang.md`` explains why a plan stays right while it is in use.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.forest import PrefixForest
from deft_backend.hosts.sglang.prefixes.page_table import PageTableSource
from deft_backend.hosts.sglang.prefixes.radix_trees import RadixTreeSource, UnifiedTreeSource
from deft_backend.hosts.sglang.versions import place_of, tree_paths

logger = logging.getLogger("deft_backend")

Key = tuple[Any, ...]
"""Id of a request, its row of the page table, its tree node, and its tokens that the tree owns.

If the keys are equal and in the same order, the batch has the same requests and shares no less than
before. Ids are unique among live requests only, so code that keeps keys must also keep the
requests."""


TreeReader = RadixTreeSource | UnifiedTreeSource


class CachedTree:
    """The tree of the host's prefix cache, if its kind can be read.

    - `otherwise`: what happens under a cache that cannot be read, for the log.
    - `bigrams`: whether to read trees of bigrams, which EAGLE and MTP have.
    """

    def __init__(self, otherwise: str, *, bigrams: bool = False) -> None:
        self._otherwise, self._bigrams = otherwise, bigrams
        self._tree_cache: Any = None
        self._tree: TreeReader | None = None

    def forest(
        self, tree_cache: Any, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]
    ) -> PrefixForest | None:
        """Forest of a batch, or None; see :meth:`PrefixSource.forest`."""
        kind = type(tree_cache).__qualname__
        if tree_cache is not self._tree_cache:
            self._tree_cache = tree_cache
            self._tree = tree_reader(tree_cache, bigrams=self._bigrams)
            if self._tree is None:
                logger.info(
                    "deft: the prefix cache %s has no tree that the plugin reads; %s",
                    kind, self._otherwise,
                )  # fmt: skip
        if self._tree is None:
            return None
        try:
            return self._tree.forest(requests, seq_lens)
        except Exception as error:
            self._tree = None  # permanently: the next batch would fail in the same way
            logger.warning(
                "deft: the tree of the prefix cache %s cannot be read (%r); from now on, %s",
                kind, error, self._otherwise,
            )  # fmt: skip
            return None


class PrefixSource:
    """Reads the forest of each batch: from the tree if its kind is known, else from the page table.

    - `page_table`: the host's ``req_to_token``.
    """

    def __init__(self, page_table: torch.Tensor) -> None:
        self._page_table = PageTableSource(page_table)
        self._tree = CachedTree("the page table shows what requests share")

    def forest(
        self, tree_cache: Any, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]
    ) -> PrefixForest:
        """Forest of a decode batch.

        The token being decoded is always in a leaf, even if the tree owns it.

        - `tree_cache`: the host's prefix cache.
        - `requests` [B]: the host's requests, in batch order.
        - `seq_lens` [B] int: tokens of each request, the one being decoded included.
        """
        forest = self._tree.forest(tree_cache, requests, seq_lens)
        return self._page_table.forest(requests, seq_lens) if forest is None else forest


def key_of(request: Any) -> Key:
    """The values that decide which prefix of the request others may share; see :data:`Key`."""
    row, owned = place_of(request)
    return (id(request), row, request.last_node, owned)


def tree_reader(tree_cache: Any, *, bigrams: bool = False) -> TreeReader | None:
    """The reader for a prefix cache; None if only the page table shows the sharing.

    There are readers for the plain tree (also with caching off) and for the unified tree. Nodes of
    other caches may hold tokens outside the page table's pages (hierarchical caches to 0.5.18,
    sliding windows, Mamba). A tree of bigrams, whose keys are a token shorter than their text, is
    read with `bigrams` alone.
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

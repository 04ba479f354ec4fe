"""The set `verify`: requests of several query tokens, chains and DeFT's recorded token trees."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.kernel.tree_workloads import VERIFY, Workload
from benchmarks.recorded_traces import TokenTree, load_trace
from deft_backend.forest import PrefixForest, forest_from_paths
from deft_backend.tools.traces.arrivals import TraceError
from deft_backend.tools.traces.tree_forests import forest_from_levels

CHAINS = (4, 8, 2)
"""Query tokens of a chain: the drafted tokens and the one before them."""

REQUESTS = (64, 1, 16, 256)
ALONE = 2048
"""Tokens of each request that shares nothing."""

SHARED = (16384, 2048, 65536)
OWN = 256
"""Tokens of a shared prefix, and of each request behind it."""

CONTEXTS = (1600, 16384, 4096, 65536)
TREE_REQUESTS = (1, 8, 32)
"""Tokens that all requests with a token tree share, and how many requests there are."""


def verified_workloads(traces: Path | None) -> list[Workload]:
    """Chains; with `traces`, a file or a folder of DeFT's recordings, also their token trees.

    Raises
    ------
    TraceError
        If a file is not a trace, or none of them is a token tree.
    """
    chains = [
        _chain(f"{requests} alone, {ALONE}", f"{requests} {ALONE}", tokens)
        for tokens in CHAINS
        for requests in REQUESTS
    ]
    chains += [
        _chain(f"{requests} on {shared} + {OWN}", f"1,{requests} {shared},{OWN}", tokens)
        for tokens in CHAINS
        for shared in SHARED
        for requests in REQUESTS
        if requests > 1 and requests * (shared + OWN) <= 64 * (65536 + OWN)
    ]
    return chains if traces is None else [*chains, *_trees(traces)]


def _chain(name: str, levels: str, tokens: int) -> Workload:
    return Workload(
        VERIFY, f"chain of {tokens}: {name}", partial(forest_from_levels, levels), 16, tokens
    )


def _trees(path: Path) -> list[Workload]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    recorded = [(file.stem, load_trace(file)) for file in files]
    trees = [(name, tree) for name, tree in recorded if isinstance(tree, TokenTree)]
    if not trees:
        raise TraceError(
            f"{path} holds no token tree; expected files with Tree_Structure and Records, such as "
            "DeFT's APPS_tree_size64.json"
        )
    return [
        Workload(
            VERIFY,
            f"{name}: {requests} on {context}",
            partial(_shared, context, requests, tokens),
            16,
            tokens,
            parents,
        )
        for requests in TREE_REQUESTS
        for context in CONTEXTS
        for name, tree in sorted(trees, key=lambda found: len(found[1].paths))
        for parents in [tree.parents]
        for tokens in [len(parents)]
    ]


def _shared(context: int, requests: int, tokens: int) -> PrefixForest:
    """Requests on one context, each with its own query tokens behind it."""
    paths = [[("context", context), (request, tokens)] for request in range(requests)]
    return forest_from_paths(paths, [context + tokens] * requests)


def seen_by(parents: tuple[int, ...] | None, query_tokens: int) -> npt.NDArray[np.bool_]:
    """[query tokens, query tokens]: which of them each sees. Without parents they are a chain.

    >>> seen_by((-1, 0, 0), 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    if parents is None:
        return np.tri(query_tokens, dtype=np.bool_)
    seen = np.eye(query_tokens, dtype=np.bool_)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def bits_of(seen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[query tokens, words] int64: the same in bits, as `TreeAttention.run` takes them."""
    tokens = len(seen)
    padded = np.zeros((tokens, -(-tokens // 64) * 64), dtype=np.bool_)
    padded[:, :tokens] = seen
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int64)

"""The authors' own kernels: FastTree's and DeFT's, as FastTree's artifact holds and calls them.

The variable FASTTREE_ARTIFACT names a checkout of PanZaifeng/FastTree-Artifact (167928b). The code
of that repository is read at run time and is no part of this one.
"""

from __future__ import annotations

import hashlib
import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from deft_backend.forest import PrefixForest

VARIABLE = "FASTTREE_ARTIFACT"

Q_TILES = {1: (64, 16), 4: (16, 4), 16: (4, 1)}
"""Queries of the tiles of both phases, by query heads a KV head (the artifact's run_benchmark.sh).
The values below are the defaults of its benchmark.py."""

KV_TILES = (32, 32)
KV_SPLITS, WHOLE = (1024, 128), (81920, 81920)
FIRST_THRESHOLDS, SECOND_THRESHOLDS = (132, 528), (132, 132)
ALPHA, BETA, GAMMA = 0.66, 0.33, 0.1

SUBTREE_TOKENS, MASK_BITS = 128, 64
"""Of DeFT: tokens of an even block, and queries of a mask."""

DEEPEST = 20_000
"""DeFT's planner calls itself once for each block of a node and for each level."""


class ArtifactMethod(Method):
    """A kernel of the artifact's folder ``kernel_bench``; `module` is its file."""

    module: str

    def unavailable(self, device: torch.device) -> str | None:
        try:
            artifact_module(self.module)
        except Exception as error:  # another project's code may raise anything
            return f"{VARIABLE} names no checkout of FastTree's artifact: {error}".splitlines()[0]
        return None if device.type == "cuda" else "needs an NVIDIA GPU"

    def origin(self) -> str:
        source = Path(str(artifact_module(self.module).__file__)).read_bytes()
        digest = hashlib.sha256(source).hexdigest()[:12]
        return f"PanZaifeng/FastTree-Artifact, {self.module}.py with SHA-256 {digest}"

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.q.dtype != torch.float16 or inputs.k_cache.dtype != torch.float16:
            raise Refused("its kernels multiply in float16")
        if inputs.query_tokens > 1:
            raise Refused("it takes one query token of each request")
        tiles = Q_TILES.get(inputs.case.query_heads // inputs.case.kv_heads)
        if tiles is None:
            raise Refused(f"the artifact has tiles for groups of {', '.join(map(str, Q_TILES))}")
        return self.plan(inputs, tiles, list(tree_of(inputs.forest)))

    @abstractmethod
    def plan(
        self, inputs: Inputs, tiles: tuple[int, int], tree: list[SimpleNamespace]
    ) -> Prepared: ...


class FastTreeArtifact(ArtifactMethod):
    """FastTree's kernels, planned by its heuristic with the artifact's weights and thresholds.

    - `gamma`: of the artifact's ablation, in which it decides alone and contexts stay whole if it
      is positive.
    """

    name = "fasttree-artifact"
    module = "fasttree"

    def __init__(self, gamma: float | None = None) -> None:
        self._weights, self._splits = (ALPHA, BETA, GAMMA), KV_SPLITS
        if gamma is not None:
            self.name = f"{self.name}/{gamma:g}"
            self._weights = (0.0, 0.0, gamma)
            self._splits = WHOLE if gamma > 0 else KV_SPLITS

    def plan(self, inputs: Inputs, tiles: tuple[int, int], tree: list[SimpleNamespace]) -> Prepared:
        if inputs.k_cache.numel() > 1 << 31:
            raise Refused("its offsets into the cache have 32 bits")
        theirs, kv_heads, dim = artifact_module(self.module), inputs.case.kv_heads, inputs.head_dim
        params = theirs.FastTreeParams()
        params.set_values(*self._weights)
        params.set_q_tile_sizes(list(tiles))
        params.set_kv_tile_sizes(list(KV_TILES))
        params.set_kv_group_num(inputs.case.query_heads // kv_heads)
        tokens = np.append(0, np.cumsum([node.seqlen for node in tree])).tolist()
        with _quiet():
            (entries, *planned), _ = theirs.fasttree_preparation(
                tree,
                tokens,
                inputs.batch,
                inputs.case.query_heads,
                kv_heads,
                dim,
                self._splits,
                FIRST_THRESHOLDS,
                SECOND_THRESHOLDS,
                params,
            )
        entries = moved(entries, inputs.flattened_slots())
        keys, values = (cache.view(-1, kv_heads, dim) for cache in (inputs.k_cache, inputs.v_cache))
        out = torch.empty_like(inputs.q)

        def launch() -> torch.Tensor:
            # Their planner may replace the tiles in `params`.
            theirs.fasttree_decode(
                inputs.q, keys, values, out, entries, *planned, params.TSQs, params.TSKs, dim**-0.5
            )
            return out

        return Prepared(launch, facts={"items": sum(planned[-2])})


class DeftArtifact(ArtifactMethod):
    """DeFT-Flatten's kernels, as FastTree's authors wrote them for comparison."""

    name = "deft-artifact"
    module = "DeFT"

    def plan(self, inputs: Inputs, tiles: tuple[int, int], tree: list[SimpleNamespace]) -> Prepared:
        theirs, kv_heads, dim = artifact_module(self.module), inputs.case.kv_heads, inputs.head_dim
        longest = int(inputs.tables.seq_lens.max())
        # Their cache holds each request by itself; only its shape counts for the plan.
        unpaged = torch.empty(inputs.batch, longest, 0)
        theirs.cur_length = 0  # tokens that an earlier plan left in its last block
        with _quiet():
            entries, *planned = theirs.DeFT_preparation(
                tree, unpaged, SUBTREE_TOKENS, MASK_BITS, inputs.case.query_heads, dim
            )
        entries = moved(entries, inputs.slots_of_requests(longest))
        keys, values = (cache.view(-1, kv_heads, dim) for cache in (inputs.k_cache, inputs.v_cache))
        out = torch.empty_like(inputs.q)

        def launch() -> torch.Tensor:
            theirs.DeFT_decode(
                inputs.q,
                keys,
                values,
                out,
                entries,
                *planned,
                tiles[0],
                KV_TILES[0],
                dim**-0.5,
                MASK_BITS,
            )
            return out

        return Prepared(launch, facts={"items": len(planned[0])})


@cache
def artifact_module(name: str) -> Any:
    """A module of the artifact; raises ImportError or KeyError if there is none."""
    folder = str(Path(os.environ[VARIABLE]) / "kernel_bench")
    sys.path.insert(0, folder)
    try:
        return import_module(name)
    finally:
        sys.path.remove(folder)


def tree_of(forest: PrefixForest) -> Iterator[SimpleNamespace]:
    """The nodes as the artifact describes them, below a root of no tokens if there are several.

    Node 0 is the root; ``requests`` are rows of Q.
    """
    roots = np.flatnonzero(forest.parent < 0)
    joined = len(roots) > 1

    def node(at: int, parent: int, tokens: int, below: int, requests: Sequence[int]) -> Any:
        return SimpleNamespace(
            id=at, parent=parent, seqlen=tokens, num_children=below, requests=list(requests)
        )

    if joined:
        yield node(0, -1, 0, len(roots), range(forest.batch_size))
    for at in range(forest.num_nodes):
        parent, below = int(forest.parent[at]) + joined, len(forest.children[at])
        tokens, requests = int(forest.length[at]), forest.queries(at).tolist()
        yield node(at + joined, parent, tokens, below, requests)


def moved(entries: torch.Tensor, slots: npt.NDArray[np.int64]) -> torch.Tensor:
    """The plan's places in the artifact's cache as places in the paged one; -1 pads both."""
    held = torch.from_numpy(np.append(slots, -1).astype(np.int32)).to(entries.device)
    return held[entries.long()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Their planners print, and call themselves deeply."""
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(DEEPEST)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        sys.setrecursionlimit(depth)

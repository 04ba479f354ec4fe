"""What the device planner's kernels hand to one another: arrays on the device.

Every array is int32 unless its entry says otherwise. A request here is a query of the plan: one of
the request's query blocks. B is the number of them that the kernels are compiled for. Nodes stand
at the place of their leading cut (``find_nodes``); place 0 stands for the virtual root. Ranges
[2 B] are those of nodes, then those of the leaf of the request at each place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deft_backend.planner.device_plan import Pointer
from deft_backend.shapes import MAX_TOKENS

CANDIDATES = 32
"""Most lengths of chunks that `deft-flatten` chooses from."""


class Tables(NamedTuple):
    """The batch, as hosts hold it."""

    page_table: Pointer  # [rows, P] int32 or int64: page ids
    table_rows: Pointer  # [requests] int: the request's row of the page table
    seq_lens: Pointer
    """[requests] int; requests of the host, each of which may have several query blocks."""


class Ranks(NamedTuple):
    """Each request [B] among the others, by request index.

    Zero before each plan: ``compare_rows`` adds to them. Any numbers give a valid plan.
    """

    rank: Pointer  # how many requests come before it in depth-first order
    common: Pointer  # tokens that it shares with one of those


class Nodes(NamedTuple):
    """The forest [B], besides the place of each node's first query."""

    cut: Pointer  # [B + 1]: tokens that the request at a place shares with the one before it
    queries: Pointer  # queries of the node that stands at this place; 0 if none does
    parent: Pointer
    leaf_parent: Pointer  # node above the leaf of the request at each place
    leaves: Pointer  # how many requests have their leaf right below the node
    below: Pointer  # [2, B]: tiles of the nodes right below the node, by tile shape


class Ranges(NamedTuple):
    """KV ranges [2 B]."""

    queries: Pointer  # queries whose items read the range together; 0: no range
    begin: Pointer
    end: Pointer  # the range's first token, and the one after its last


class Chosen(NamedTuple):
    """The nodes with ranges of their own [B], in order of place."""

    count: Pointer  # [1]: how many they are
    place: Pointer
    first: Pointer  # place of the node's first query
    queries: Pointer
    begin: Pointer
    end: Pointer


class Places(NamedTuple):
    """Where the items, entries and partial results of each range [2 B] go in the plan."""

    num_chunks: Pointer  # chunks of the range
    item: Pointer
    entry: Pointer  # the range's first item, and its first entry
    part: Pointer  # partial results of the ranges above it: these precede its own


class Search(NamedTuple):
    """Memory of the search over edges (``assign_edges.py``), by place: one array behind another.

    The first four are of the child that begins at a place.
    """

    queries: Pointer
    end: Pointer
    joins: Pointer  # whether the child takes its node's tokens along
    joined: Pointer  # queries of such siblings before it
    # Where the leaf at each place begins, and where it stands.
    leaf_begin: Pointer
    leaf_place: Pointer
    node_place: Pointer  # where each node stands
    deserted: Pointer  # whether the node's last query leaves it


class Results(NamedTuple):
    """Partial results of the request at each place [B]."""

    parts: Pointer  # how many they are; 1: the leaf's only item writes the output
    merged: Pointer
    """How many of them the leaf's item merges. 0: stage 2 merges them, if there are several."""


class Candidates(NamedTuple):
    num_chunks: Pointer  # [candidates]: chunks of the longest range
    cost: Pointer  # [2, candidates] float32: expected nanoseconds, by tile shape
    chunk: Pointer  # [2, candidates]: tokens of a chunk


class Elements(NamedTuple):
    """Nodes and leaves [2 B] in the order of the flattened forest."""

    flat: Pointer  # int64: tokens of the flattened forest before the element
    begin: Pointer
    end: Pointer
    first: Pointer  # place of the first query
    queries: Pointer


class Groups(NamedTuple):
    """Chunks [items]."""

    element: Pointer  # the first element
    slices: Pointer
    first: Pointer
    queries: Pointer
    tiles: Pointer  # how many tiles the queries fill
    tile: Pointer  # number of the first of them


class Tiles(NamedTuple):
    """Tiles [items], chunk by chunk."""

    group: Pointer
    first: Pointer
    queries: Pointer
    place: Pointer  # place of the tile's shape in ITEM_ORDER
    tokens: Pointer
    segments: Pointer
    item: Pointer
    entry: Pointer
    segment: Pointer  # the tile's first item, entry and segment in the plan


class Flat(NamedTuple):
    """The arrays of ``flatten.py`` and ``write_flattened.py``."""

    order: Pointer
    cut: Pointer
    first: Pointer
    ranges: Ranges
    chosen: Chosen
    results: Results
    # [CANDIDATES], by length of a chunk: the candidate's number, or CANDIDATES if it does not fit;
    # and how many chunks the forest has.
    candidate: Pointer
    count: Pointer
    elements: Elements
    groups: Groups
    tiles: Tiles


class Counters(NamedTuple):
    """Plans, tokens of context in them, tokens that their items load, and nanoseconds."""

    total: Pointer  # [4] int64
    seen: Pointer  # [4] int64, a copy in CPU memory
    began: Pointer  # [1] int64: the GPU's clock when planning began


def new_counters(device: torch.device) -> torch.Tensor:
    """[4] int64 in CPU memory, 0: plans; tokens of context in them, which decoding query by query
    reads; tokens that their items load; nanoseconds of planning, by the GPU's clock.
    """
    return torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")


class Costs(NamedTuple):
    """Nanoseconds of an item and of one of its tokens, by tile shape, and of a partial result."""

    small_item: float
    small_token: float
    large_item: float
    large_token: float
    partial: float


class Scratch:
    """The device planner's arrays for a batch of `size`, a multiple of 4, besides the plan's.

    Groups are plain tuples in the order of their structures' fields, as launches pass them.

    - `num_chunks` [candidates]: the longest range's chunks.
    - `most_tiles`: 0 unless the policy is `deft-flatten`.
    - `seen` [4] int64: in CPU memory.
    """

    def __init__(
        self,
        size: int,
        num_chunks: list[int],
        most_tiles: int,
        seen: torch.Tensor,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Rows begin at multiples of 16 bytes: launches of one variant must have the same alignment.
        rank, common, order, cut, first, queries, parent, leaf_parent, leaves, parts, merged = (
            by_request := zeros(11, size + 4)
        )
        by_range, count, by_node = zeros(7, 2 * size), zeros(4), zeros(5, size)
        below, guess = zeros(2 * size), zeros(size, size)
        candidates = (
            torch.tensor(num_chunks, dtype=torch.int32, device=device),
            zeros(2 * len(num_chunks), dtype=torch.float32),
            torch.full((2 * len(num_chunks),), MAX_TOKENS, dtype=torch.int32, device=device),
        )
        counted, began = zeros(4, dtype=torch.int64), zeros(2, dtype=torch.int64)
        starts, tiles = zeros(2 * size, dtype=torch.int64), zeros(15, -(-most_tiles // 4) * 4)
        fits = torch.full((2, CANDIDATES), CANDIDATES, dtype=torch.int32, device=device)

        self.ranks = (rank, common)
        #: [B, B]: pages that each two requests had in common in the plan before; above the diagonal
        self.guess = guess
        self.order = order  # [B]: request index at each place
        self.first = first  # [B]: place of each node's first query
        self.nodes = (cut, queries, parent, leaf_parent, leaves, below)
        self.ranges, self.chosen = tuple(by_range[:3]), (count, *by_node)
        self.places = tuple(by_range[3:])
        self.search = by_range[3:]  # [8, B]: `Search`, in the memory of `places`, written later
        self.results = (parts, merged)
        self.candidates = candidates
        self.counters = (counted, seen, began)
        self.flat = (
            *(order, cut, first, self.ranges, self.chosen, self.results, *fits),
            *((starts, *self.places), tuple(tiles[:6]), tuple(tiles[6:])),
        )
        # The memory that plans write, and memory with numbers from the start, and the counters.
        self.cleared = (
            *(by_request, by_range, count, by_node, below, guess),
            *(*candidates[1:], starts, tiles),
        )
        self._kept = (candidates[0], counted, began, fits)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory, most of them for pairs of requests."""
        return sum(tensor.nbytes for tensor in (*self.cleared, *self._kept))

    def clear(self) -> None:
        """Make the arrays as they were before the first plan, except the counters."""
        for tensor in self.cleared:
            tensor.zero_()
        self.candidates[2].fill_(MAX_TOKENS)  # 0 tokens would be endlessly many chunks

"""What the device planner's launches take: work of a program, and numbers of a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.policies import Target
from deft_backend.policies.chunk_choice import NUM_CHUNKS

SIZES = (64, 256, 1024, 2048)
"""Batches that the kernels are compiled for; a smaller batch leaves lanes idle."""

MOST_ELEMENTS = 1 << 20  # most elements of a Triton tensor


class Warps(NamedTuple):
    compare_rows: int
    sort_rows: int
    find_nodes: int
    choose_ranges: int
    price_chunks: int
    measure_ranges: int
    write_plan: int


@dataclass(frozen=True)
class ProgramWork:
    """How much work one program of each kernel has."""

    # Requests that one program of ``compare_rows`` compares with as many others; at least 8.
    rows: int
    # Requests that one program of ``sort_rows``, and of ``find_nodes``, compares with all others.
    sorted: int
    nodes: int
    ranges: int  # ranges that one program of ``measure_ranges`` compares with all others
    # Ranges with which it compares them at a time.
    leaf_columns: int
    node_columns: int
    leaves: int  # requests whose leaves one program of ``write_plan`` writes
    node_programs: int  # programs of ``write_plan`` that write nodes, at most
    tile_programs: int  # programs of each kernel for tiles of `deft-flatten`, at most
    width: int  # entries of a node that one program writes at a time
    candidates: int  # chunk lengths that are priced for each tile shape; a power of two
    warps: Warps  # warps of a program

    @classmethod
    def on_gpu(cls, size: int) -> ProgramWork:
        """As much work for each program as its registers hold; for the largest size, what was
        fastest of the variants in docs/kernel-log.md."""
        many = 8 if size > 256 else 4
        found = cls(
            rows=16 if size > 256 else 8,
            sorted=8,
            nodes=8,
            ranges=4,
            leaf_columns=min(size, 512),
            node_columns=min(size, 256),
            leaves=32,
            node_programs=256,
            tile_programs=2048,
            width=1024 if size > 256 else 256,
            candidates=64,
            warps=Warps(*[many] * 7)._replace(compare_rows=4, measure_ranges=4),
        )
        if size <= 1024:
            return found
        warps = found.warps._replace(
            compare_rows=2, sort_rows=2, find_nodes=4, choose_ranges=32, write_plan=16
        )
        return replace(found, sorted=4, nodes=2, leaf_columns=1024, warps=warps)

    @classmethod
    def interpreted(cls, size: int) -> ProgramWork:
        """Few programs: the interpreter's time is Python's, for each program and operation."""
        many = min(size, MOST_ELEMENTS // size)
        return cls(
            rows=min(size, 1024),
            sorted=many,
            nodes=many,
            ranges=many,
            leaf_columns=size,
            node_columns=size,
            leaves=size,
            node_programs=8,
            tile_programs=4,
            width=256,
            candidates=4,
            warps=Warps(*[4] * 7),
        )

    def num_chunks(self) -> list[int]:
        """[candidates] of NUM_CHUNKS, the last repeated."""
        every = max(1, len(NUM_CHUNKS) // self.candidates)
        found = NUM_CHUNKS[::every][: self.candidates]
        return [*found, *[found[-1]] * (self.candidates - len(found))]


def largest_batch() -> int:
    """Requests that a plan made on the device may hold."""
    return SIZES[-1]


class Numbers:
    """What the kernels take from a target."""

    def __init__(self, target: Target) -> None:
        *times, self.partial_ns, self.reduce_ns = target.tile_costs().tolist()
        small, large = target.single_range_tiles
        self.target = target
        self.tiles = (small, large)  # queries that the small tile and the large tile serve
        # Nanoseconds of an item and of one of its tokens, for the small tile and the large tile.
        self.per_item = ((times[0], times[2]), (times[1], times[3]))
        self.sms = target.num_sms / target.num_kv_heads  # for each KV head
        #: The fields of :class:`~deft_backend.planner.on_device.tiles.Estimate`.
        self.estimate = _estimate(target.costs.tokens, target.estimates())


def _estimate(
    knots: npt.NDArray[np.float64], times_ns: npt.NDArray[np.float64]
) -> tuple[tuple[float, ...], ...]:
    """``C_est`` as a line and its bends: knots [K], and times of each tile shape [2, K]."""
    rises = np.diff(times_ns, axis=1) / np.diff(knots)
    at_zero = times_ns[:, :1] - knots[0] * rises[:, :1]
    lines = np.hstack([at_zero, rises[:, :1], np.diff(rises, axis=1)])
    return (tuple(knots[1:-1].tolist()), *(tuple(line) for line in lines.tolist()))

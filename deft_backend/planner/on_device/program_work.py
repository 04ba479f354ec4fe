"""How much work one program of each of the device planner's kernels has, by the batch's size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from deft_backend.policies.chunk_choice import NUM_CHUNKS

SIZES = (64, 256, 1024, 2048)
"""Batches that the kernels are compiled for; a smaller batch leaves lanes idle."""

MOST_ELEMENTS = 1 << 20  # most elements of a Triton tensor


class Warps(NamedTuple):
    """Warps of a program, by kernel."""

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
    width: int  # entries of a node that one program writes at a time
    candidates: int  # chunk lengths that are priced for each tile shape; a power of two
    warps: Warps  # warps of a program

    @classmethod
    def on_gpu(cls, size: int) -> ProgramWork:
        """As much work for each program as its registers hold; for the largest size, what was
        fastest of the variants in docs/kernel-log.md."""
        many = 8 if size > 256 else 4
        found = cls(
            rows=16 if size > 256 else 8, sorted=8, nodes=8, ranges=4,
            leaf_columns=min(size, 512), node_columns=min(size, 256), leaves=32,
            node_programs=256, width=1024 if size > 256 else 256, candidates=64,
            warps=Warps(
                compare_rows=4, sort_rows=many, find_nodes=many, choose_ranges=many,
                price_chunks=many, measure_ranges=4, write_plan=many,
            ),
        )  # fmt: skip
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
            rows=min(size, 1024), sorted=many, nodes=many, ranges=many, leaf_columns=size,
            node_columns=size, leaves=size, node_programs=8, width=256, candidates=4,
            warps=Warps(*[4] * 7),
        )  # fmt: skip

    def num_chunks(self) -> list[int]:
        """[candidates] of NUM_CHUNKS, the last repeated."""
        every = max(1, len(NUM_CHUNKS) // self.candidates)
        found = NUM_CHUNKS[::every][: self.candidates]
        return [*found, *[found[-1]] * (self.candidates - len(found))]


def largest_batch() -> int:
    """Requests that a plan made on the device may hold."""
    return SIZES[-1]

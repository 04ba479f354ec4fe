"""How much work one program of each of the device planner's kernels has, by the batch's size."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.policies.chunk_choice import NUM_CHUNKS

SIZES = (64, 256, 1024, 2048)
"""Batches that the kernels are compiled for; a smaller batch leaves lanes idle."""

MOST_ELEMENTS = 1 << 20
"""Most elements of a Triton tensor."""


@dataclass(frozen=True)
class ProgramWork:
    """How much work one program of each kernel has.

    Attributes
    ----------
    rows : int
        Requests that one program of ``compare_rows`` compares with as many others; at least 8.
    row_warps : int
        Warps of such a program.
    places : int
        Requests that one program of ``sort_rows`` and ``find_nodes`` compares with all others.
    ranges : int
        Ranges that one program of ``measure_ranges`` compares with all others.
    leaf_columns, node_columns : int
        Ranges with which it compares them at a time.
    leaves : int
        Requests whose leaves one program of ``write_plan`` writes.
    nodes : int
        Programs of ``write_plan`` that write nodes, at most.
    width : int
        Entries of a node that one program writes at a time.
    candidates : int
        Chunk lengths that are priced for each tile shape; a power of two.
    """

    rows: int
    row_warps: int
    places: int
    ranges: int
    leaf_columns: int
    node_columns: int
    leaves: int
    nodes: int
    width: int
    candidates: int

    @classmethod
    def on_gpu(cls, size: int) -> ProgramWork:
        """As much work for each program as its registers hold."""
        return cls(
            rows=16 if size > 256 else 8, row_warps=4, places=4 if size > 1024 else 8, ranges=4,
            leaf_columns=min(size, 512), node_columns=min(size, 256), leaves=32, nodes=256,
            width=256 if size <= 256 else 1024, candidates=64,
        )  # fmt: skip

    @classmethod
    def interpreted(cls, size: int) -> ProgramWork:
        """Few programs: the interpreter's time is Python's, for each program and operation."""
        many = min(size, MOST_ELEMENTS // size)
        return cls(
            rows=min(size, 1024), row_warps=4, places=many, ranges=many, leaf_columns=size,
            node_columns=size, leaves=size, nodes=8, width=256, candidates=4,
        )  # fmt: skip

    def num_chunks(self) -> list[int]:
        """[candidates] of NUM_CHUNKS, the last repeated."""
        every = max(1, len(NUM_CHUNKS) // self.candidates)
        found = NUM_CHUNKS[::every][: self.candidates]
        return [*found, *[found[-1]] * (self.candidates - len(found))]


def largest_batch() -> int:
    """Requests that a plan made on the device may hold."""
    return SIZES[-1]

"""How much work one program of each of the device planner's kernels has, by the batch's size."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.policies.chunk_choice import PIECES

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
        Requests that one program of ``compare_rows`` compares with all others.
    places : int
        Requests or ranges that one program of the other kernels compares with all others.
    leaves : int
        Requests whose leaves one program writes.
    candidates : int
        Chunk lengths that are priced for each tile shape; a power of two.
    """

    rows: int
    places: int
    leaves: int
    candidates: int

    @classmethod
    def on_gpu(cls, size: int) -> ProgramWork:
        """As much work for each program as its registers hold."""
        many = size > 1024
        return cls(rows=2 if many else 4, places=4 if many else 8, leaves=32, candidates=64)

    @classmethod
    def interpreted(cls, size: int) -> ProgramWork:
        """Few programs: the interpreter's time is Python's, for each program and operation."""
        many = min(size, MOST_ELEMENTS // (2 * size))  # each is compared with all ranges
        return cls(rows=many, places=many, leaves=size, candidates=4)

    def pieces(self) -> list[int]:
        """[candidates] of PIECES, the last repeated."""
        every = max(1, len(PIECES) // self.candidates)
        found = PIECES[::every][: self.candidates]
        return [*found, *[found[-1]] * (self.candidates - len(found))]


def largest_batch() -> int:
    """Requests that a plan made on the device may hold."""
    return SIZES[-1]

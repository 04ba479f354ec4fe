"""Numbers of a launch's programs that spread its first items over the SMs.

The GPU places all programs of a launch evenly, but not the first ones of them: of 264 programs, two
on each SM, the first 128 lie on 120 SMs of an H100. So if fewer items than programs take their
programs by `program_id`, some SMs work on two items while others have none. Here the programs count
themselves instead, in memory that all of them share:

- A program that is its SM's first takes the next number from 0 on.
- Every other program takes the next number from the last one down.

So each number is one program's, wherever the GPU places the programs.
"""

from __future__ import annotations

from contextlib import suppress

from triton.language import constexpr

from deft_backend.kernels.gluon_versions import jit

with suppress(ImportError):  # `gluon_versions.available` says so before anything is launched
    from triton.experimental.gluon import language as gl

ARRIVALS = 512
"""Counters of a workspace: :data:`FIRST`, :data:`LATER`, and one for each SM."""

FIRST, LATER, BY_SM = constexpr(0), constexpr(1), constexpr(2)
"""Counter of programs that are their SM's first; of all others; and of the first SM's programs."""

SMS = constexpr(ARRIVALS - 2)
"""SMs that have a counter of their own. Two SMs that share one are counted as one."""


@jit
def spread_number(arrivals):
    """The number of this program; the counters must be 0 before the launch."""
    sm = gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    before = gl.atomic_add(arrivals + BY_SM.value + sm % SMS.value, 1, sem="relaxed")
    counter = gl.where(before == 0, FIRST.value, LATER.value)
    place = gl.atomic_add(arrivals + counter, 1, sem="relaxed")
    return gl.where(before == 0, place, gl.num_programs(0) - 1 - place)

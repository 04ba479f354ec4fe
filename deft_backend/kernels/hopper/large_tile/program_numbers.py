"""Numbers of a launch's programs that spread its first items over the SMs.

The GPU places all programs of a launch evenly, but not the first ones of them: of 264 programs, two
on each SM, the first 128 lie on 120 SMs of an H100. So if few items take their programs by
`program_id`, some SMs work on two items while others have none. Here the programs count themselves
instead, in memory that all of them share:

- A program that is its SM's first takes the next number from 0 on.
- Every other program takes the next number from the last one down.

So each number is one program's, wherever the GPU places the programs.
"""

from __future__ import annotations

from triton.language import constexpr

from deft_backend.kernels.hopper.parts import plus
from deft_backend.kernels.hopper.versions import gl, jit
from deft_backend.planner.encoding import ARRIVALS

FIRST, LATER, BY_SM = constexpr(0), constexpr(1), constexpr(2)
"""The plan's counters: of programs that are their SM's first, of all others, and from here on one
for each SM."""

SMS = constexpr(ARRIVALS - 2)
"""SMs that have a counter of their own. Two SMs that share one are counted as one."""


@jit
def _count(counter, LAYOUT: gl.constexpr):
    """[threads]: how often the counter was counted before, in the first thread; 0 in all others.

    Nothing waits for the number before it is used. It would for ``atomic_add``, and for ``add``,
    whose result the assembler shares with the other threads of the warp.
    """
    thread = gl.arange(0, 32 * gl.num_warps(), layout=LAYOUT.each)
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        setp.eq.s32 first, $2, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff;
        }""",
        "=&r,l,r", [counter + thread * 0, thread], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def count_on_sm(arrivals, LAYOUT: gl.constexpr):
    """Count this program on its SM; returns what :func:`spread_number` takes."""
    sm = gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    return _count(arrivals + BY_SM.value + sm % SMS.value, LAYOUT)


@jit
def spread_number(arrivals, counted, LAYOUT: gl.constexpr):
    """The number of this program. All programs of the launch must ask for theirs.

    Before the launch, FIRST and LATER must be 0. Where an SM's counter is not, none of its programs
    counts as the first one: the numbers hold, but spread less.
    """
    first = gl.reduce(counted, 0, plus) == 0
    counter = gl.where(first, FIRST.value, LATER.value)
    place = gl.reduce(_count(arrivals + counter, LAYOUT), 0, plus)
    return gl.where(first, place, gl.num_programs(0) - 1 - place)

"""What the kernels in Gluon share: the language where there is one, and small functions in it."""

from __future__ import annotations

from typing import Any

import triton

try:
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl

    _IMPORTED = True
except ImportError:
    _IMPORTED = False

    def jit(function: Any) -> Any:
        """Leave a kernel uncompiled where there is nothing to compile it."""
        return function


__all__ = ["ask", "available", "capped", "jit", "larger", "next_slot", "plus", "read_item"]

TRITON_VERSIONS = ("3.6.",)
"""Versions whose Gluon, an experimental language, the kernels were written for and tested with."""


def available() -> bool:
    """Whether this Triton can compile the kernels (for compute capability 9.0 alone)."""
    return _IMPORTED and triton.__version__.startswith(TRITON_VERSIONS)


@jit
def ask(pointer, mask):
    """Ask the L2 cache for what lies at addresses, where `mask` says so. Nothing waits for it."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [pointer, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def larger(a, b):
    """For reductions."""
    return gl.maximum(a, b)


@jit
def plus(a, b):
    """For reductions."""
    return a + b


@jit
def capped(scores, scale, logit_cap, SOFT_CAP: gl.constexpr):
    """Scores under the soft cap, if there is one, in base 2."""
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction. `scale` is
        # sm_scale here, without the change of base.
        LOG2_E: gl.constexpr = 1.4426950408889634
        doubled = gl.exp2(scores * (scale * 2.0 * LOG2_E / logit_cap))
        scores = (logit_cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
    return scores


@jit
def read_item(
    work, work_end, item_query_ptr, segment_row_ptr, segment_start_ptr, segment_end_ptr,
    NUM_KV_HEADS: gl.constexpr,
):  # fmt: skip
    """An item's first entry, queries, row, start and end. Of no item: of an empty one."""
    item = work // NUM_KV_HEADS  # item and segment are one: see TILE_SEGMENTS
    there = work < work_end
    entry = gl.load(item_query_ptr + item, mask=there, other=0)
    entry_end = gl.load(item_query_ptr + item + 1, mask=there, other=0)
    row = gl.load(segment_row_ptr + item, mask=there, other=0)
    start = gl.load(segment_start_ptr + item, mask=there, other=0)
    stop = gl.load(segment_end_ptr + item, mask=there, other=0)
    return entry, entry_end - entry, row, start, stop


@jit
def next_slot(slot, SLOTS: gl.constexpr):
    """The slot after this one in a ring."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1)

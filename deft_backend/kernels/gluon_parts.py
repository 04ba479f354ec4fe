"""What the kernels in Gluon share: small functions in it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from deft_backend.kernels.gluon_versions import jit

with suppress(ImportError):  # `gluon_versions.available` says so before anything is launched
    from triton.experimental.gluon import language as gl


class Item(NamedTuple):
    """What the plan says of an item of one KV range."""

    entry: Any
    """Its first entry."""
    queries: Any
    request: Any
    """The request whose tokens the range is of."""
    listed: Any
    """The request's row of the page table, or the request if `table_rows` is by request."""
    start: Any
    stop: Any
    """Where the range ends; OPEN_END for an open one."""


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
def capped(scores, scaling, SOFT_CAP: gl.constexpr):
    """Scores under the soft cap, if there is one, in base 2."""
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction.
        LOG2_E: gl.constexpr = 1.4426950408889634
        doubled = gl.exp2(scores * (scaling.scale * 2.0 * LOG2_E / scaling.cap))
        scores = (scaling.cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
    return scores


@jit
def _listed(pointer, there, AHEAD: gl.constexpr):
    """A number of an item's, 0 of no item's. With AHEAD, loaded before it is known which it is.

    Volatile, then: the compiler would move such a load behind what it does not depend on.
    """
    if AHEAD:
        return gl.where(there, gl.load(pointer, volatile=True), 0)
    else:
        return gl.load(pointer, mask=there, other=0)


@jit
def read_item(
    work, work_end, tensors, plan, HEADS: gl.constexpr, CACHE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """First link of the chain of loads: what the plan says of the item that `work` belongs to.

    Without an item, an empty one. With AHEAD, the item is one of the READ_AHEAD for which every
    plan has room.
    """
    number = work // HEADS.num_kv  # of the item and of its only segment
    there = work < work_end
    entry = _listed(plan.item_query_ptr + number, there, AHEAD)
    entry_end = _listed(plan.item_query_ptr + number + 1, there, AHEAD)
    request = _listed(plan.segment_request + number, there, AHEAD)
    listed = request
    if CACHE.table_by_segment:
        listed = _listed(tensors.table_rows + number, there, AHEAD)
    start = _listed(plan.segment_start + number, there, AHEAD)
    stop = _listed(plan.segment_end + number, there, AHEAD)
    return Item(entry, entry_end - entry, request, listed, start, stop)


@jit
def table_row(item, tensors, CACHE: gl.constexpr):
    """Row of the page table of an item's KV range: a second link, unless segments list it."""
    found = item.listed.to(gl.int64)
    if not CACHE.table_by_segment:
        found = gl.load(tensors.table_rows + item.listed).to(gl.int64)
    return found


@jit
def range_end(item, tensors):
    """End of an item's KV range: an open range ends where its request's sequence ends now."""
    length = gl.load(tensors.seq_lens + item.request, mask=item.stop < 0, other=0).to(gl.int32)
    return gl.where(item.stop < 0, length, item.stop)


@jit
def offsets_of(
    page, position, STRIDE_PAGE: gl.constexpr, STRIDE_TOKEN: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Where tokens lie in a cache, in units of 16 bytes: 32 bits of them reach 64 GiB."""
    gl.static_assert(STRIDE_PAGE % 8 == 0)
    gl.static_assert(STRIDE_TOKEN % 8 == 0)
    offset = page * (STRIDE_PAGE // 8)
    if PAGE_SIZE > 1:
        in_page = (position.to(gl.uint32) % PAGE_SIZE).to(gl.int32)
        offset += in_page * (STRIDE_TOKEN // 8)
    return offset


@jit
def next_slot(slot, SLOTS: gl.constexpr):
    """The slot after this one in a ring."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1)

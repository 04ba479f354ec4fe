"""What the kernels in Gluon share: small functions in it."""

from __future__ import annotations

from contextlib import suppress

from deft_backend.kernels.gluon_versions import jit

with suppress(ImportError):  # `gluon_versions.available` says so before anything is launched
    from triton.experimental.gluon import language as gl


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
    """First link: an item's first entry, queries, row, page-table row, start and end.

    Unless rows of the page table are listed by segment, that one is found by `table_row`. Of no
    item: those of an empty one. With AHEAD, the item is one of the READ_AHEAD that plans have room
    for.
    """
    item = work // HEADS.num_kv  # item and segment are one: see TILE_SEGMENTS
    there = work < work_end
    entry = _listed(plan.item_query_ptr + item, there, AHEAD)
    entry_end = _listed(plan.item_query_ptr + item + 1, there, AHEAD)
    row = _listed(plan.segment_request + item, there, AHEAD)
    table = row
    if CACHE.table_by_segment:
        table = _listed(tensors.table_rows + item, there, AHEAD)
    start = _listed(plan.segment_start + item, there, AHEAD)
    stop = _listed(plan.segment_end + item, there, AHEAD)
    return entry, entry_end - entry, row, table, start, stop


@jit
def table_row(listed, tensors, CACHE: gl.constexpr):
    """Row of the page table of an item that was read: a second link, unless segments list it."""
    found = listed.to(gl.int64)
    if not CACHE.table_by_segment:
        found = gl.load(tensors.table_rows + listed).to(gl.int64)
    return found


@jit
def range_end(row, stop, tensors):
    """Where a range ends: an open one, where its row's sequence ends now."""
    length = gl.load(tensors.seq_lens + row, mask=stop < 0, other=0).to(gl.int32)
    return gl.where(stop < 0, length, stop)


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

"""Copies to shared memory for large tiles: page ids, offsets, then keys and values (Gluon)."""

from __future__ import annotations

from contextlib import suppress

from deft_backend.kernels.gluon_versions import async_load, barrier, jit, reinterpret

with suppress(ImportError):  # `available` says so before anything is launched
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@jit
def _within(position, least, most):
    """Positions, those outside a segment moved to its ends.

    Of an empty segment, the token before it: its row may end there.
    """
    return gl.maximum(gl.minimum(position, most), gl.minimum(least, most))


@jit
def copy_pages(buffer, table, position, least, most, PAGE_SIZE: gl.constexpr):
    """Start copying the page ids of positions within a segment."""
    async_load(buffer, table + _within(position, least, most) // PAGE_SIZE)


@jit
def row_of_place(place, AT_ONCE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Row of a block whose offset is at a place in shared memory.

    Rows that one thread copies, AT_ONCE apart, lie one behind the other: it reads them at once.
    """
    PASSES: gl.constexpr = BLOCK_N // AT_ONCE
    return place % PASSES * AT_ONCE + place // PASSES


@jit
def first_positions(
    start, stop, KNOWN: gl.constexpr, BLOCK_N: gl.constexpr, AT_ONCE: gl.constexpr,
    LIST: gl.constexpr,
):  # fmt: skip
    """Where a segment's last block begins, its last position, and positions of its first blocks.

    Those are its last KNOWN ones, the last first. Masked rows, too, hold tokens of the segment:
    others, even times 0, could spoil the result.
    """
    blocks = gl.maximum((stop - start + BLOCK_N - 1) // BLOCK_N, 1)
    last = start + (blocks - 1) * BLOCK_N
    most = gl.maximum(stop - 1, 0)
    known = gl.arange(0, KNOWN * BLOCK_N, layout=LIST)
    position = last - known // BLOCK_N * BLOCK_N
    position += row_of_place(known % BLOCK_N, AT_ONCE, BLOCK_N)
    return last, most, _within(position, start, most)


@jit
def ask_item(
    there, first_pages, entries, table, entry, num_queries, start, stop, plan,
    HEADS: gl.constexpr, CACHE: gl.constexpr, TILE: gl.constexpr, KNOWN: gl.constexpr,
    AT_ONCE: gl.constexpr, LIST: gl.constexpr,
):  # fmt: skip
    """Start copying what an item needs first, if it is there.

    Page ids of `first_positions`, and of each row its query and its slot; of rows outside the tile
    those of its last query, to be read and not used.
    """
    BLOCK_N: gl.constexpr = TILE.block_tokens
    BLOCK_M: gl.constexpr = TILE.height
    _, _, position = first_positions(start, stop, KNOWN, BLOCK_N, AT_ONCE, LIST)
    row = row_of_place(gl.arange(0, BLOCK_M, layout=LIST), AT_ONCE, BLOCK_M) + (num_queries >> 16)
    row_entry = entry + gl.minimum(row // HEADS.group, num_queries - 1)
    async_load(
        first_pages, table + position // CACHE.page_size,
        mask=gl.full([KNOWN * BLOCK_N], True, gl.int1, LIST) & there,
    )  # fmt: skip
    some = gl.full([BLOCK_M], True, gl.int1, LIST) & there
    async_load(entries.index(0), plan.entry_query + row_entry, mask=some)
    async_load(entries.index(1), plan.entry_slot + row_entry, mask=some)
    commit_group()


@jit
def read_offsets(offsets, AT_ONCE: gl.constexpr, ROW: gl.constexpr):
    """[rows]: the offsets of a block, from the order of `row_of_place`."""
    ROWS: gl.constexpr = offsets.shape[0]
    PASSES: gl.constexpr = ROWS // AT_ONCE
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.reshape(gl.arange(0, ROWS, layout=ROW), [PASSES, AT_ONCE])
    LAYOUT: gl.constexpr = gl.permute(rows, (1, 0)).type.layout
    found = reinterpret(offsets, gl.int32, [AT_ONCE, PASSES], SHARED).load(LAYOUT)
    return gl.convert_layout(gl.reshape(gl.permute(found, (1, 0)), [ROWS]), ROW)


@jit
def result_place(query, slot, head, strides, HEADS: gl.constexpr):
    """Where rows' results go, in units of 16 bytes: into the output if negative, without the sign.

    Else among partial results. 31 bits of them reach 32 GiB.
    """
    direct = query * (strides.out_batch // 8) + head * (strides.out_head // 8)
    partial = (slot * (HEADS.num_kv * HEADS.group) + head) * (HEADS.dim // 8)
    return gl.where(slot < 0, direct.to(gl.int32) | -0x80000000, partial)


@jit
def copy_block(exists, buffer, base, offset, COPY: gl.constexpr):
    """Start copying a block of K or V of one KV head, or of Q; zeros where nothing exists.

    `base` points to the head's first token, `offset` tells where the block's tokens lie. `exists`
    is of the whole block, or [rows, 1]. A mask in place of a branch: the compiler puts a barrier
    into every branch that copies.
    """
    pointers = gl.expand_dims(base, 0) + (offset.to(gl.uint32).to(gl.int64) * 8)[:, None]
    some = gl.full([buffer.shape[0], buffer.shape[1]], True, gl.int1, COPY)
    async_load(buffer, pointers, mask=some & exists)
    commit_group()


@jit
def arrived(OUTSTANDING: gl.constexpr):
    """All but the newest OUTSTANDING copies have landed, for the tensor cores and every thread."""
    wait_group(OUTSTANDING)
    barrier()
    fence_async_shared()

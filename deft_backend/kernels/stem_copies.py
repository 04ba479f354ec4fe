"""How a stem's blocks come to shared memory: page ids, then keys and values (Gluon)."""

from __future__ import annotations

from contextlib import suppress

from deft_backend.kernels.gluon_parts import jit

with suppress(ImportError):  # `available` says so before anything is launched
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
        async_copy_global_to_shared,
        commit_group,
        wait_group,
    )
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@jit
def copy_ids(buffer, table, position, least, most, PAGE_SIZE: gl.constexpr):
    """Start copying the page ids of positions, those outside a segment moved to its ends.

    Of an empty segment, the page before it: its row may end there.
    """
    position = gl.maximum(gl.minimum(position, most), gl.minimum(least, most))
    async_copy_global_to_shared(buffer, table + position // PAGE_SIZE)


@jit
def copy_block(
    exists, buffer, head_ptr, page, token, offs_d, STRIDE_PAGE: gl.constexpr,
    STRIDE_TOKEN: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Start copying a block of K or V of one KV head; zeros if it does not exist.

    `token` is each row's position, of which the part within its page counts. A mask in place of a
    branch: the compiler puts a barrier into every branch that copies.
    """
    # In units of 16 bytes 32 bits reach 64 GiB, and one 32-bit product finds a token.
    gl.static_assert(STRIDE_PAGE % 8 == 0)
    gl.static_assert(STRIDE_TOKEN % 8 == 0)
    offset = page.to(gl.int32) * (STRIDE_PAGE // 8)
    if PAGE_SIZE > 1:
        offset += (token.to(gl.uint32) % PAGE_SIZE).to(gl.int32) * (STRIDE_TOKEN // 8)
    offset = offset.to(gl.uint32).to(gl.int64) * 8
    mask = (offs_d >= 0)[None, :] & exists
    async_copy_global_to_shared(buffer, head_ptr + offset[:, None] + offs_d[None, :], mask=mask)
    commit_group()


@jit
def arrived(OUTSTANDING: gl.constexpr):
    """All but the newest OUTSTANDING copies have landed, for the tensor cores and every thread."""
    wait_group(OUTSTANDING)
    gl.thread_barrier()
    fence_async_shared()


@jit
def read_row(row, seq_lens_ptr, table_rows_ptr):
    """Tokens of a row's sequence, and its row of the page table."""
    length = gl.load(seq_lens_ptr + row).to(gl.int32)
    return length, gl.load(table_rows_ptr + row).to(gl.int64)

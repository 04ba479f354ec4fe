"""Stage 1 for the large tile on Hopper: the tensor cores stay busy during the softmax.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments and results of
`partial_attention`, for the large tile alone: one KV range to which every query attends.

The plain kernel multiplies Q K^T, waits, computes the softmax while the tensor cores idle, and
multiplies P V. This kernel, written in Gluon, chooses when each matrix product starts and when it
needs the result (FlashAttention-3, section 3.2: GEMM-softmax pipelining).

Q K^T of the next block and P V of this block start together; the softmax of the next block runs
during P V.

The kernel takes KV blocks from the segment's end to its start. Only the first block, before the
loop, needs a mask for tokens past the end.

The kernel copies K and V into rings of shared-memory buffers. K runs LOOKAHEAD blocks ahead of the
product that starts next, and V runs one block behind K. One thread for each token computes where
the token lies, and the threads that copy read that offset: one ring holds page ids, and a second
ring holds the offsets, a few blocks later. One thread for each query vector computes in the same
way where the vector lies and where its result goes. While the kernel writes one item, it already
loads the page ids, queries and slots that the next item needs first.

Each block meets two barriers. The first one and its proxy fence make all copies visible to the
tensor cores. After the second one, no warp reads the oldest buffers, so copies may overwrite them.

Addresses and strides of Q, K and V must be multiples of 16 bytes.
"""

from __future__ import annotations

from deft_backend.kernels.gluon_parts import (
    ask,
    capped,
    larger,
    next_slot,
    offsets_of,
    plus,
    range_end,
    read_item,
    table_row,
)
from deft_backend.kernels.gluon_versions import barrier, jit, reinterpret
from deft_backend.kernels.large_tile_copies import (
    arrived,
    ask_item,
    copy_block,
    copy_pages,
    first_positions,
    read_offsets,
    result_place,
    row_of_place,
)
from deft_backend.kernels.large_tile_softmax import add_rescaled, masked, settled, softmax

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import wait_group
    from triton.experimental.gluon.language.nvidia.hopper import (
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # `available` says so before anything is launched
    pass


@jit
def hopper_large_tile_attention(
    tensors, plan, scaling, strides, HEADS: gl.constexpr, CACHE: gl.constexpr, TILE: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    LOOKAHEAD: gl.constexpr = TILE.lookahead
    GQA_GROUP: gl.constexpr = HEADS.group
    HEAD_DIM: gl.constexpr = HEADS.dim
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    PARTIAL: gl.constexpr = tensors.partial.out.dtype.element_ty
    gl.static_assert(tensors.partial.out.dtype.element_ty == gl.float16)
    # Blocks in shared memory, of K and of V: the one being multiplied and those on their way.
    SLOTS: gl.constexpr = LOOKAHEAD + 1
    # Blocks of which it is known where their tokens lie, a power of two: from the V block that is
    # copied next to one behind the K block that is.
    KNOWN: gl.constexpr = 4 if LOOKAHEAD <= 2 else 8
    gl.static_assert(KNOWN >= LOOKAHEAD + 2)
    SAME_STRIDES: gl.constexpr = CACHE.k_page == CACHE.v_page and CACHE.k_token == CACHE.v_token
    # Allow this many copies in flight when waiting for the next K block; its V block was issued
    # earlier and has arrived.
    OUTSTANDING: gl.constexpr = 2 * LOOKAHEAD - 2

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUTPUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    # 16 bytes a thread, whole rows side by side.
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0]
    )
    COPY_ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    # Rows that are copied at once: so far apart are those that one thread copies.
    AT_ONCE: gl.constexpr = 256 // HEAD_DIM * WARPS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    # One number a thread.
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    # The plan's arrays are views of one buffer (DevicePlan): what stage 1 reads of it is brought to
    # the L2 while its first number is on its way.
    lines = (plan.entry_slot.to(gl.int64) - plan.tile_ptr.to(gl.int64)) // 64
    line = gl.program_id(0) + gl.num_programs(0) * gl.arange(0, 32 * WARPS, layout=LIST)
    ask(plan.tile_ptr + line * 16, line < lines)

    k_shared = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, HEAD_DIM], SHARED)
    v_shared = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, HEAD_DIM], SHARED)
    k_known = gl.allocate_shared_memory(gl.int32, [KNOWN, BLOCK_N], PLAIN)
    # Page ids of the blocks behind those, on their way for PAGES / 2 steps.
    PAGES: gl.constexpr = 8
    pages = gl.allocate_shared_memory(tensors.page_table.dtype.element_ty, [PAGES, BLOCK_N], PLAIN)
    v_known = k_known
    if not SAME_STRIDES:
        v_known = gl.allocate_shared_memory(gl.int32, [KNOWN, BLOCK_N], PLAIN)
    # Q, and later the results, as whole rows, where and while no block of V is.
    gl.static_assert(BLOCK_M == BLOCK_N)
    rows_shared = v_shared.index(LOOKAHEAD)
    # Of each row: where its query lies, and where its result goes (`result_place`).
    places = gl.allocate_shared_memory(gl.int32, [2, BLOCK_M], PLAIN)

    factor = scaling.scale
    if MODE.soft_cap:
        factor = 1.0

    gl.static_assert(TILE.place == 0)  # these items come first in the plan
    work_end = gl.load(plan.tile_ptr + 1) * HEADS.num_kv

    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))

    first_work = gl.program_id(0)
    step_work = gl.num_programs(0)
    entry, num_queries, row, listed, start, stop = read_item(
        first_work, work_end, tensors, plan, HEADS, CACHE, AHEAD=True
    )
    table_at = listed.to(gl.int64)
    # Where an item's first pages, and its rows' queries and slots, come to: memory that holds pages
    # of later blocks, and where tokens lie, once the item has begun.
    first_pages = reinterpret(pages, pages.dtype, [PAGES * BLOCK_N], PLAIN).slice(
        0, KNOWN * BLOCK_N
    )
    entries = k_known
    # A program without an item ends here, and only then lets the next kernel start: programs that
    # start while some SMs still hold idle ones crowd onto the others and stay there.
    if first_work < work_end:
        if MODE.overlapped:
            gdc_launch_dependents()
        stop = range_end(row, stop, tensors)
        table_at = table_row(listed, tensors, CACHE)
        ask_item(
            True, first_pages, entries, tensors.page_table + table_at * strides.table, entry,
            num_queries, start, stop, plan, HEADS, CACHE, TILE, KNOWN, AT_ONCE, LIST,
        )  # fmt: skip

    for work in range(first_work, work_end, step_work):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        # A 0 that the compiler does not know: what depends on a row's number alone would otherwise
        # be computed once for all items, and held in registers that the loop over blocks needs.
        zero = num_queries >> 16
        table = tensors.page_table + table_at * strides.table
        k_base = tensors.k + kv_head.to(gl.int64) * CACHE.k_head + offs_d
        v_base = tensors.v + kv_head.to(gl.int64) * CACHE.v_head + offs_d
        tokens = gl.maximum(stop - start, 0)
        # An empty range runs one block, all of it masked.
        filled = (tokens + BLOCK_N - 1) // BLOCK_N
        blocks = gl.maximum(filled, 1)

        # What `ask_item` asked for has landed, of every thread.
        wait_group(0)
        barrier()
        last, most, first_at = first_positions(start, stop, KNOWN, BLOCK_N, AT_ONCE, LIST)
        first_page = first_pages.load(LIST).to(gl.int32)
        row_query = entries.index(0).load(LIST)
        row_slot = entries.index(1).load(LIST)
        row_m = row_of_place(gl.arange(0, BLOCK_M, layout=LIST), AT_ONCE, BLOCK_M) + zero
        head = kv_head * GQA_GROUP + row_m % GQA_GROUP
        barrier()

        reinterpret(k_known, gl.int32, [KNOWN * BLOCK_N], PLAIN).store(
            offsets_of(first_page, first_at, CACHE.k_page, CACHE.k_token, CACHE.page_size)
        )
        if not SAME_STRIDES:
            reinterpret(v_known, gl.int32, [KNOWN * BLOCK_N], PLAIN).store(
                offsets_of(first_page, first_at, CACHE.v_page, CACHE.v_token, CACHE.page_size)
            )
        q_at = row_query * (strides.q_batch // 8) + head * (strides.q_head // 8)
        places.index(0).store(q_at.to(gl.int32))
        places.index(1).store(result_place(row_query, row_slot, head, strides, HEADS))
        barrier()
        q_offset = read_offsets(places.index(0), AT_ONCE, COPY_ROW)
        in_tile = gl.arange(0, BLOCK_M, layout=COPY_ROW) + zero < num_queries * GQA_GROUP
        copy_block(in_tile[:, None], rows_shared, tensors.q + offs_d, q_offset, COPY)
        for ahead in gl.static_range(LOOKAHEAD + 1):
            if ahead > 0:
                offset = read_offsets(v_known.index(ahead - 1), AT_ONCE, COPY_ROW)
                copy_block(filled > ahead - 1, v_shared.index(ahead - 1), v_base, offset, COPY)
            offset = read_offsets(k_known.index(ahead), AT_ONCE, COPY_ROW)
            copy_block(filled > ahead, k_shared.index(ahead), k_base, offset, COPY)
            if ahead == 0:
                # Pages of the blocks behind those: none of them is needed before V of the first.
                behind = gl.arange(0, PAGES // 2 * BLOCK_N, layout=LIST)
                behind_at = last - KNOWN * BLOCK_N - behind // BLOCK_N * BLOCK_N
                behind_at += row_of_place(behind % BLOCK_N, AT_ONCE, BLOCK_N)
                copy_pages(
                    reinterpret(pages, pages.dtype, [PAGES * BLOCK_N], PLAIN)
                    .slice(KNOWN % PAGES * BLOCK_N, PAGES // 2 * BLOCK_N),
                    table, behind_at, start, most, CACHE.page_size,
                )  # fmt: skip
        page_at = last - KNOWN * BLOCK_N
        page_at += row_of_place(gl.arange(0, BLOCK_N, layout=LIST), AT_ONCE, BLOCK_N)

        # What the next item needs first is on its way while this one is worked on.
        next_entry, next_queries, next_row, next_listed, next_start, next_stop = read_item(
            work + step_work, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
        )
        arrived(2 * LOOKAHEAD)
        q = rows_shared.load(QUERIES)  # a V block comes where Q is
        no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
        scores = warpgroup_mma(q, k_shared.index(0).permute((1, 0)), no_scores, use_acc=False)
        scores = capped(scores, scaling, MODE.soft_cap)
        scores = masked(scores, tokens - (blocks - 1) * BLOCK_N, BLOCK_M, BLOCK_N, SCORES)

        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
        acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, OUTPUT)
        # The slots of the V block to multiply next and of the K block to multiply next.
        now = 0
        following = 1

        fresh, added, maximum, rescale = softmax(scores, maximum, factor, BLOCK_M, BLOCK_N, ROW)
        total = added
        weights = gl.convert_layout(fresh.to(DTYPE), WEIGHTS)
        for step in range(0, blocks - 1):
            arrived(OUTSTANDING)
            started = warpgroup_mma(
                q, k_shared.index(following).permute((1, 0)), no_scores,
                use_acc=False, is_async=True,
            )  # fmt: skip
            summing = warpgroup_mma(weights, v_shared.index(now), acc, is_async=True)
            # V goes where the V block before this one was, K where this one's was.
            before = gl.where(now == 0, LOOKAHEAD, now - 1)
            v_at, k_at = step + LOOKAHEAD, step + LOOKAHEAD + 1
            v_offset = read_offsets(v_known.index(v_at % KNOWN), AT_ONCE, COPY_ROW)
            k_offset = read_offsets(k_known.index(k_at % KNOWN), AT_ONCE, COPY_ROW)
            # Where the tokens of one more block lie. Behind one barrier with the copies.
            page = pages.index((step + KNOWN) % PAGES).load(LIST).to(gl.int32)
            k_known.index(step % KNOWN).store(
                offsets_of(page, page_at, CACHE.k_page, CACHE.k_token, CACHE.page_size)
            )
            if not SAME_STRIDES:
                v_known.index(step % KNOWN).store(
                    offsets_of(page, page_at, CACHE.v_page, CACHE.v_token, CACHE.page_size)
                )
            copy_pages(
                pages.index((step + KNOWN + PAGES // 2) % PAGES), table,
                page_at - PAGES // 2 * BLOCK_N, start, most, CACHE.page_size,
            )  # fmt: skip
            page_at -= BLOCK_N
            copy_block(filled > v_at, v_shared.index(before), v_base, v_offset, COPY)
            copy_block(filled > k_at, k_shared.index(now), k_base, k_offset, COPY)
            now = following
            following = next_slot(following, SLOTS)
            scores = warpgroup_mma_wait(1, deps=[started])
            scores = capped(scores, scaling, MODE.soft_cap)
            fresh, added, maximum, rescale = softmax(scores, maximum, factor, BLOCK_M, BLOCK_N, ROW)
            total = add_rescaled(total, rescale, settled(added))
            acc, weights, fresh = warpgroup_mma_wait(0, deps=[summing, weights, fresh])
            weights = gl.convert_layout(fresh.to(DTYPE), WEIGHTS)
            acc = acc * gl.convert_layout(rescale, OUTPUT_ROW)[:, None]

        next_stop = range_end(next_row, next_stop, tensors)
        table_at = table_row(next_listed, tensors, CACHE)
        arrived(0)
        ask_item(
            work + step_work < work_end, first_pages, entries,
            tensors.page_table + table_at * strides.table, next_entry, next_queries, next_start,
            next_stop, plan, HEADS, CACHE, TILE, KNOWN, AT_ONCE, LIST,
        )  # fmt: skip
        acc = warpgroup_mma(weights, v_shared.index(now), acc)
        sums = gl.convert_layout(gl.reduce(total, 1, plus), ROW)

        # An empty range contributes nothing: O = 0, LSE = -inf.
        empty = sums == 0.0
        lse = gl.where(empty, float("-inf"), maximum + gl.log2(sums))
        inverse = gl.where(empty, 0.0, 1.0 / sums)
        inverse = gl.convert_layout(inverse, OUTPUT_ROW)
        # Partial results keep 11 bits of mantissa relative to their row's largest element, whatever
        # the range of the cache's dtype. Of float16 they have the range, being means of V, of
        # weights that are rounded: halves of them never exceed it.
        largest = gl.full([BLOCK_M], 2.0, gl.float32, OUTPUT_ROW)
        if DTYPE != PARTIAL:
            largest = gl.maximum(gl.reduce(gl.abs(acc), 1, larger) * inverse, 1.0e-30)

        # Q has been read: its memory turns the results into whole rows, so that threads side
        # by side write side by side.
        row_at = read_offsets(places.index(1), AT_ONCE, OUTPUT_ROW)
        result = acc * gl.where(row_at < 0, inverse, inverse / largest)[:, None]
        bits = result.to(PARTIAL).to(gl.int16, bitcast=True)
        if DTYPE != PARTIAL:
            direct_bits = result.to(DTYPE).to(gl.int16, bitcast=True)
            bits = gl.where((row_at < 0)[:, None], direct_bits, bits)
        rows = reinterpret(rows_shared, gl.int16, [BLOCK_M, HEAD_DIM], SHARED)
        barrier()
        rows.store(bits)
        zero = now >> 16  # as above, of a number not known before the loop
        row_m = gl.arange(0, BLOCK_M, layout=OUTPUT_ROW) + zero
        partial = (row_m < num_queries * GQA_GROUP) & (row_at >= 0)
        where = row_at // (HEAD_DIM // 8)
        gl.store(tensors.partial.scale + where, largest, mask=partial)
        gl.store(tensors.partial.lse + where, gl.convert_layout(lse, OUTPUT_ROW), mask=partial)
        barrier()
        bits = rows.load(COPY)
        at = read_offsets(places.index(1), AT_ONCE, COPY_ROW)
        offs_m = gl.arange(0, BLOCK_M, layout=COPY_ROW) + zero
        in_tile = offs_m < num_queries * GQA_GROUP
        elements = (at & 0x7FFFFFFF).to(gl.int64)[:, None] * 8 + offs_d[None, :]
        gl.store(
            tensors.out.to(gl.pointer_type(gl.int16), bitcast=True) + elements, bits,
            mask=(in_tile & (at < 0))[:, None],
        )  # fmt: skip
        gl.store(
            tensors.partial.out.to(gl.pointer_type(gl.int16), bitcast=True) + elements, bits,
            mask=(in_tile & (at >= 0))[:, None],
        )  # fmt: skip
        # The next item's Q comes into the same memory.
        barrier()
        entry, num_queries, start, stop = next_entry, next_queries, next_start, next_stop

    if MODE.overlapped:
        gdc_wait()

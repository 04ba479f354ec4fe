"""Stage 1 on Hopper: partial attention of hot prefixes, tensor cores busy during the softmax.

The same items, arguments and results as `partial_attention` (FlashForge's PAC, Algorithm 2), for
the tile shape whose items are nothing but a **stem**, one KV range to which every query of the tile
attends.

The plain kernel multiplies Q K^T, waits, takes the softmax while the tensor cores idle, multiplies
P V. This one, written in Gluon, says itself when each matrix product starts and when its result is
needed (FlashAttention-3, section 3.2: GEMM-softmax pipelining).

Q K^T of the next block and P V of this block start together; the softmax of the next block runs
during P V.

Blocks run from the segment's end to its start, so that only the first one, before the loop, masks
tokens past the end.

K and V blocks are gathered by page ids into rings of shared-memory buffers, LOOKAHEAD blocks ahead
of the block whose scores are started next. A barrier a block orders both directions: what every
thread has copied is visible to the tensor cores after it (a proxy fence comes before), and the
products that read the oldest buffers have ended in both warpgroups, so copies may overwrite them.

Everything that Q, K and V are read through is a multiple of 16 bytes: their addresses, and their
strides.
"""

from __future__ import annotations

from deft_backend.kernels.gluon_parts import capped, jit, larger, plus

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
        async_copy_global_to_shared,
        commit_group,
        wait_group,
    )
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # `available` says so before anything is launched
    pass


@jit
def _by_thread(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, columns..] with each of the 4 threads that share a row on the third axis from the end.

    A thread of a matrix product's result holds two neighbours in every eight columns. Several
    short chains instead of one long chain keep the arithmetic units filled.
    """
    return gl.reshape(x, [ROWS, 4, COLUMNS // 32, 4, 2])


@jit
def _row_max(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS]: each row's maximum."""
    x = _by_thread(x, ROWS, COLUMNS)
    x = gl.reduce(gl.reduce(gl.reduce(x, 2, larger), 1, larger), 2, larger)
    return gl.reduce(x, 1, larger)


@jit
def _thread_sum(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, 4]: the sum of what each of the 4 threads that share a row holds of it."""
    x = _by_thread(x, ROWS, COLUMNS)
    return gl.reduce(gl.reduce(gl.reduce(x, 2, plus), 1, plus), 2, plus)


@jit
def _softmax(
    scores, maximum, factor, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Weights of one block, their sums by thread, the new row maxima and what the old ones lost.

    `factor` brings scores to base 2.
    """
    highest = _row_max(scores, ROWS, COLUMNS)
    new_maximum = gl.maximum(maximum, gl.convert_layout(highest, ROW) * factor)
    # A row that has seen no token yet keeps its maximum at -inf: avoid -inf - -inf.
    reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = gl.exp2(scores * factor - reference[:, None])
    rescale = gl.exp2(maximum - reference)
    return weights, _thread_sum(weights, ROWS, COLUMNS), new_maximum, rescale


@jit
def _add_rescaled(total, rescale, added):
    """Sums by thread, with those of one more block."""
    ROW: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return total * gl.convert_layout(rescale, ROW)[:, None] + added


@jit
def _mask(scores, tokens, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """Scores with -inf in the columns from `tokens` on.

    By groups of eight columns, which every thread has some of: the groups' numbers are constants.
    """
    groups = gl.reshape(scores, [ROWS, COLUMNS // 8, 8])
    LAYOUT: gl.constexpr = groups.type.layout
    group = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    left = gl.expand_dims(gl.expand_dims(tokens - group * 8, 0), 2)
    blocks = gl.expand_dims(gl.expand_dims(column, 0), 1) < left
    groups = gl.where(blocks, groups, float("-inf"))
    return gl.convert_layout(gl.reshape(groups, [ROWS, COLUMNS]), SCORES)


@jit
def _rows(zero, ROWS: gl.constexpr, STEP: gl.constexpr, ROW: gl.constexpr):
    """0, 1, .. ROWS - 1, in no register before `zero`, a 0 that the compiler does not know, is.

    What depends on a row's number alone would otherwise be computed once for all items, and held
    in registers that the loop over blocks needs. A thread's rows are STEP apart. The exclusive or
    keeps the compiler from adding up all but `zero` in advance.
    """
    LAYOUT: gl.constexpr = gl.reshape(
        gl.arange(0, ROWS, layout=ROW), [ROWS // STEP, STEP]
    ).type.layout
    many = (gl.arange(0, ROWS // STEP, layout=gl.SliceLayout(1, LAYOUT)) * STEP) ^ zero
    first = gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT))
    return gl.convert_layout(gl.reshape(many[:, None] + first[None, :], [ROWS]), ROW)


@jit
def _page(table, position, PAGE_SIZE: gl.constexpr):
    """Page of each position, of position 0 for those before it, which no block is copied from."""
    return gl.load(table + gl.maximum(position, 0) // PAGE_SIZE).to(gl.int32)


@jit
def _inside(position, start, stop):
    """Positions, those outside a segment moved to its first or last token."""
    return gl.maximum(gl.minimum(gl.maximum(position, start), stop - 1), 0)


@jit
def _first_page(table, position, start, stop, tokens, PAGE_SIZE: gl.constexpr):
    """Pages of positions that may be outside the segment; its row may have no page at all."""
    return gl.where(tokens > 0, _page(table, _inside(position, start, stop), PAGE_SIZE), 0)


@jit
def _copy(
    buffer, head_ptr, page, token, offs_d, STRIDE_PAGE: gl.constexpr, STRIDE_TOKEN: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Start copying a block of K or V of one KV head."""
    # In units of 16 bytes 32 bits reach 64 GiB, and one 32-bit product finds a token.
    gl.static_assert(STRIDE_PAGE % 8 == 0)
    gl.static_assert(STRIDE_TOKEN % 8 == 0)
    offset = page * (STRIDE_PAGE // 8)
    if PAGE_SIZE > 1:
        offset += (token.to(gl.uint32) % PAGE_SIZE).to(gl.int32) * (STRIDE_TOKEN // 8)
    offset = offset.to(gl.uint32).to(gl.int64) * 8
    async_copy_global_to_shared(buffer, head_ptr + offset[:, None] + offs_d[None, :])
    commit_group()


@jit
def _copy_block(
    exists, k_buffer, v_buffer, k_head, v_head, page, token, offs_d,
    STRIDE_K_PAGE: gl.constexpr, STRIDE_K_TOKEN: gl.constexpr,
    STRIDE_V_PAGE: gl.constexpr, STRIDE_V_TOKEN: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Start copying a block of K, then of V. Without a block the copies still count, as empty.

    `token` is each row's position, of which the part within its page counts.
    """
    if exists:
        _copy(k_buffer, k_head, page, token, offs_d, STRIDE_K_PAGE, STRIDE_K_TOKEN, PAGE_SIZE)
        _copy(v_buffer, v_head, page, token, offs_d, STRIDE_V_PAGE, STRIDE_V_TOKEN, PAGE_SIZE)
    else:
        commit_group()
        commit_group()


@jit
def _arrived(OUTSTANDING: gl.constexpr):
    """All but the newest OUTSTANDING copies have landed, for the tensor cores and every thread."""
    wait_group(OUTSTANDING)
    fence_async_shared()
    gl.thread_barrier()


@jit
def _next(slot, SLOTS: gl.constexpr):
    return gl.where(slot == SLOTS - 1, 0, slot + 1)


@jit
def stem_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    partial_scale_ptr,
    page_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    tile_ptr,
    item_segment_ptr,
    item_query_ptr,
    segment_row_ptr,
    segment_start_ptr,
    segment_end_ptr,
    segment_span_ptr,
    entry_query_ptr,
    entry_slot_ptr,
    scale,
    logit_cap,
    stride_q_batch,
    stride_q_head,
    stride_out_batch,
    stride_out_head,
    stride_table,
    STRIDE_K_PAGE: gl.constexpr,
    STRIDE_K_TOKEN: gl.constexpr,
    STRIDE_K_HEAD: gl.constexpr,
    STRIDE_V_PAGE: gl.constexpr,
    STRIDE_V_TOKEN: gl.constexpr,
    STRIDE_V_HEAD: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LOOKAHEAD: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GQA_GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GQA_GROUP
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    PARTIAL: gl.constexpr = partial_out_ptr.dtype.element_ty
    gl.static_assert(partial_out_ptr.dtype.element_ty == gl.float16)
    gl.static_assert(LOOKAHEAD <= 2)  # page_0 to page_2
    # K blocks in shared memory: the one being multiplied and those on their way. A V block is
    # multiplied one step after its K block, under schedule 2 two.
    K_SLOTS: gl.constexpr = LOOKAHEAD + 1
    V_SLOTS: gl.constexpr = LOOKAHEAD + 2
    # Copies that may be on their way when the next block's K is needed (V, older, is there then).
    OUTSTANDING: gl.constexpr = 2 * LOOKAHEAD - 1

    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUTPUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    # 16 bytes a thread, whole rows side by side.
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0]
    )
    COPY_ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)

    if OVERLAPPED:
        gdc_launch_dependents()

    q_shared = gl.allocate_shared_memory(DTYPE, [BLOCK_M, HEAD_DIM], SHARED)
    k_shared = gl.allocate_shared_memory(DTYPE, [K_SLOTS, BLOCK_N, HEAD_DIM], SHARED)
    v_shared = gl.allocate_shared_memory(DTYPE, [V_SLOTS, BLOCK_N, HEAD_DIM], SHARED)

    factor = scale
    if SOFT_CAP:
        factor = 1.0

    first_item = gl.load(tile_ptr + TILE)
    work_end = gl.load(tile_ptr + TILE + 1) * NUM_KV_HEADS

    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    offs_n = gl.arange(0, BLOCK_N, layout=COPY_ROW)

    for work in range(first_item * NUM_KV_HEADS + gl.program_id(0), work_end, gl.num_programs(0)):
        # KV heads of one item are neighbours: they read the same page-table entries.
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        # Every item of this shape, and of the shapes before it, has one segment.
        entry = gl.load(item_query_ptr + item)
        num_queries = gl.load(item_query_ptr + item + 1) - entry
        row = gl.load(segment_row_ptr + item)
        start = gl.load(segment_start_ptr + item)
        stop = gl.load(segment_end_ptr + item)
        if stop < 0:  # An open segment ends where its row's sequence ends now.
            stop = gl.load(seq_lens_ptr + row).to(gl.int32)
        table = page_table_ptr + gl.load(table_rows_ptr + row).to(gl.int64) * stride_table
        k_head = k_ptr + kv_head.to(gl.int64) * STRIDE_K_HEAD
        v_head = v_ptr + kv_head.to(gl.int64) * STRIDE_V_HEAD
        tokens = gl.maximum(stop - start, 0)
        # An empty range runs one block, all of it masked.
        blocks = gl.maximum((tokens + BLOCK_N - 1) // BLOCK_N, 1)

        zero = num_queries >> 16
        offs_m = _rows(zero, BLOCK_M, 256 // HEAD_DIM * WARPS, COPY_ROW)
        in_tile = offs_m // GQA_GROUP < num_queries
        query = gl.load(entry_query_ptr + entry + offs_m // GQA_GROUP, mask=in_tile, other=0)
        head = kv_head * GQA_GROUP + offs_m % GQA_GROUP
        # Rows outside the tile read query 0's: their results go nowhere.
        q_row = query.to(gl.int64) * (stride_q_batch // 8) + head * (stride_q_head // 8)
        async_copy_global_to_shared(q_shared, q_ptr + q_row[:, None] * 8 + offs_d[None, :])

        # Position of each row of the block to be copied next. Masked rows, too, hold tokens of
        # the segment: others, even times 0, could spoil the result.
        position = start + (blocks - 1) * BLOCK_N + offs_n
        # All their page ids are on their way before the first of them is waited for: the barrier
        # keeps the compiler from reading each where it is used.
        page_0 = _first_page(table, position, start, stop, tokens, PAGE_SIZE)
        page_1 = _first_page(table, position - BLOCK_N, start, stop, tokens, PAGE_SIZE)
        page_2 = page_1
        if LOOKAHEAD > 1:
            page_2 = _first_page(table, position - 2 * BLOCK_N, start, stop, tokens, PAGE_SIZE)
        gl.thread_barrier()
        for ahead in gl.static_range(LOOKAHEAD + 1):
            page = page_0
            if ahead == 1:
                page = page_1
            if ahead == 2:
                page = page_2
            _copy_block(
                blocks > ahead, k_shared.index(ahead), v_shared.index(ahead), k_head, v_head,
                page, _inside(position, start, stop), offs_d, STRIDE_K_PAGE, STRIDE_K_TOKEN,
                STRIDE_V_PAGE, STRIDE_V_TOKEN, PAGE_SIZE,
            )  # fmt: skip
            position -= BLOCK_N
        page = _page(table, position, PAGE_SIZE)

        _arrived(2 * LOOKAHEAD + 1)
        no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
        scores = warpgroup_mma(
            q_shared, k_shared.index(0).permute((1, 0)), no_scores, use_acc=False
        )
        scores = capped(scores, scale, logit_cap, SOFT_CAP)
        scores = _mask(scores, tokens - (blocks - 1) * BLOCK_N, BLOCK_M, BLOCK_N, SCORES)

        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
        acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, OUTPUT)
        # The slots of the K block to multiply next, the V block to multiply next, and of the
        # K and V blocks to copy next.
        k_next = 1
        v_now = 0
        k_free = 0
        v_free = LOOKAHEAD + 1

        fresh, added, maximum, rescale = _softmax(scores, maximum, factor, BLOCK_M, BLOCK_N, ROW)
        total = added
        weights = gl.convert_layout(fresh.to(DTYPE), WEIGHTS)
        for step in range(0, blocks - 1):
            _arrived(OUTSTANDING)
            started = warpgroup_mma(
                q_shared, k_shared.index(k_next).permute((1, 0)), no_scores,
                use_acc=False, is_async=True,
            )  # fmt: skip
            summing = warpgroup_mma(weights, v_shared.index(v_now), acc, is_async=True)
            _copy_block(
                blocks > step + LOOKAHEAD + 1,
                k_shared.index(k_free), v_shared.index(v_free),
                k_head, v_head, page, position, offs_d, STRIDE_K_PAGE, STRIDE_K_TOKEN,
                STRIDE_V_PAGE, STRIDE_V_TOKEN, PAGE_SIZE,
            )  # fmt: skip
            position -= BLOCK_N
            page = _page(table, position, PAGE_SIZE)
            k_next = _next(k_next, K_SLOTS)
            v_now = _next(v_now, V_SLOTS)
            k_free = _next(k_free, K_SLOTS)
            v_free = _next(v_free, V_SLOTS)
            scores = warpgroup_mma_wait(1, deps=[started])
            scores = capped(scores, scale, logit_cap, SOFT_CAP)
            fresh, added, maximum, rescale = _softmax(
                scores, maximum, factor, BLOCK_M, BLOCK_N, ROW
            )
            total = _add_rescaled(total, rescale, added)
            acc, weights, fresh = warpgroup_mma_wait(0, deps=[summing, weights, fresh])
            weights = gl.convert_layout(fresh.to(DTYPE), WEIGHTS)
            acc = acc * gl.convert_layout(rescale, OUTPUT_ROW)[:, None]

        # `zero` is not known before the loop, as in `_rows`.
        zero = gl.load(item_query_ptr + item, volatile=True) - entry
        _arrived(0)
        row_m = gl.arange(0, BLOCK_M, layout=OUTPUT_ROW) + zero
        row_in_tile = row_m // GQA_GROUP < num_queries
        row_slot = gl.load(entry_slot_ptr + entry + row_m // GQA_GROUP, mask=row_in_tile, other=0)
        acc = warpgroup_mma(weights, v_shared.index(v_now), acc)
        sums = gl.convert_layout(gl.reduce(total, 1, plus), ROW)

        # An empty range contributes nothing: O = 0, LSE = -inf.
        empty = sums == 0.0
        lse = gl.where(empty, float("-inf"), maximum + gl.log2(sums))
        inverse = gl.where(empty, 0.0, 1.0 / sums)
        inverse = gl.convert_layout(inverse, OUTPUT_ROW)[:, None]
        result = gl.where(inverse == 0.0, 0.0, acc * inverse)
        # Partial results keep 11 bits of mantissa relative to their row's largest element,
        # whatever the range of the cache's dtype.
        largest = gl.reduce(gl.abs(result), 1, larger)
        largest = gl.maximum(largest, 1.0e-30)
        shrink = 1.0 / largest

        # Q has been read: its memory turns the results into whole rows, so that threads side
        # by side write side by side.
        direct_bits = result.to(DTYPE).to(gl.int16, bitcast=True)
        partial_bits = (result * shrink[:, None]).to(PARTIAL).to(gl.int16, bitcast=True)
        bits = gl.where((row_slot < 0)[:, None], direct_bits, partial_bits)
        offs_m = _rows(zero, BLOCK_M, 256 // HEAD_DIM * WARPS, COPY_ROW)
        in_tile = offs_m // GQA_GROUP < num_queries
        head = kv_head * GQA_GROUP + offs_m % GQA_GROUP
        slot = gl.load(entry_slot_ptr + entry + offs_m // GQA_GROUP, mask=in_tile, other=0)
        query = gl.load(entry_query_ptr + entry + offs_m // GQA_GROUP, mask=in_tile, other=0)
        rows = q_shared._reinterpret(gl.int16, [BLOCK_M, HEAD_DIM], SHARED)
        gl.thread_barrier()
        rows.store(bits)
        where = row_slot.to(gl.int64) * NUM_HEADS + kv_head * GQA_GROUP + row_m % GQA_GROUP
        partial = row_in_tile & (row_slot >= 0)
        gl.store(partial_scale_ptr + where, largest, mask=partial)
        gl.store(partial_lse_ptr + where, gl.convert_layout(lse, OUTPUT_ROW), mask=partial)
        gl.thread_barrier()
        bits = rows.load(COPY)
        direct_row = query.to(gl.int64) * stride_out_batch + head * stride_out_head
        partial_row = (slot.to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
        gl.store(
            out_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
            + direct_row[:, None]
            + offs_d[None, :],
            bits,
            mask=(in_tile & (slot < 0))[:, None],
        )
        gl.store(
            partial_out_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
            + partial_row[:, None]
            + offs_d[None, :],
            bits,
            mask=(in_tile & (slot >= 0))[:, None],
        )
        # The next item's Q comes into the same memory.
        gl.thread_barrier()

    if OVERLAPPED:
        gdc_wait()

"""Stage 1 for the small tile on Hopper: partial attention with loads in flight all the time.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments and results of `small_tile`.
A small tile reuses little KV, so the kernel keeps loads in flight and does little else per token:

- A program is one warp. It meets no barrier, and an SM holds many.
- The kernel copies K and V into a ring of shared-memory buffers, LOOKAHEAD KV blocks ahead of the
  block that it multiplies. The copies go on from one item to the next. Triton's own pipelining
  ends with each item, so this kernel is written in Gluon.
- An item is a chain of loads: the item, its row of the page table, page ids, keys and values. Each
  load gives the addresses of the next. The kernel starts each of them one item or one KV block
  before the next, so it never waits for a load that has just begun.
- The tensor cores compute S^T = K Q^T and O^T = V^T P^T: a tile of eight columns wastes little on a
  GQA group of four heads and holds half the registers.
- One thread for each token reads its page id and turns it into an address.

An item may **merge** the partial results that earlier launches left for its query. It then writes
the query's output, and stage 2 has nothing to do for that query.

Addresses and strides of Q, K and V must be multiples of 16 bytes.
"""

from __future__ import annotations

from deft_backend.kernels.gluon_parts import (
    capped,
    larger,
    next_slot,
    offsets_of,
    plus,
    range_end,
    read_item,
    table_row,
)
from deft_backend.kernels.gluon_versions import async_load, barrier, jit, reinterpret
from deft_backend.kernels.small_tile_results import merge_results, write_results
from deft_backend.planner import encoding_constants

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # `available` says so before anything is launched
    pass


@jit
def _tokens(row, start, stop, tensors):
    """Tokens of a range."""
    return gl.maximum(range_end(row, stop, tensors) - start, 0)


@jit
def _table(listed, tensors, strides, CACHE: gl.constexpr):
    """Where a row of the page table begins."""
    return tensors.page_table + table_row(listed, tensors, CACHE) * strides.table


@jit
def _positions(start, length, block, offs_n, BLOCK_N: gl.constexpr):
    """Positions of the tokens of one of a range's blocks, those past its end moved to its last."""
    return start + gl.minimum(block * BLOCK_N + offs_n, length - 1)


@jit
def _read_pages(
    table, start, length, block, offs_n, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """Third link: pages of the tokens of one of a range's blocks; its last token's past its end."""
    position = _positions(start, length, block, offs_n, BLOCK_N)
    some = gl.full([BLOCK_N], True, gl.int1, offs_n.type.layout)
    return gl.load(table + position // PAGE_SIZE, mask=some & (length > 0), other=0).to(gl.int32)


@jit
def _copy_rows(buffer, base, offset, exist, ROW: gl.constexpr):
    """Start copying rows, `offset` times 16 bytes from `base`; zeros unless they exist."""
    wide = gl.convert_layout(offset, ROW).to(gl.uint32).to(gl.int64) * 8
    pointers = gl.expand_dims(base, 0) + wide[:, None]
    some = gl.full([buffer.shape[0]], True, gl.int1, ROW)
    async_load(buffer, pointers, mask=some[:, None] & exist)


@jit
def _copy_queries(
    buffer, q_ptr, query, queries, kv_head, stride_q_batch, stride_q_head, offs_m, offs_d,
    GQA_GROUP: gl.constexpr,
):  # fmt: skip
    """Start copying the rows of an item's queries; zeros below them."""
    head = kv_head * GQA_GROUP + offs_m % GQA_GROUP
    q_row = query.to(gl.int64) * (stride_q_batch // 8) + head * (stride_q_head // 8)
    async_load(
        buffer,
        q_ptr + q_row[:, None] * 8 + offs_d[None, :],
        mask=(offs_m // GQA_GROUP < queries)[:, None],
    )


@jit
def hopper_small_tile_attention(
    tensors, plan, scaling, strides, HEADS: gl.constexpr, CACHE: gl.constexpr, TILE: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    LOOKAHEAD: gl.constexpr = TILE.lookahead
    GQA_GROUP: gl.constexpr = HEADS.group
    HEAD_DIM: gl.constexpr = HEADS.dim
    MERGES: gl.constexpr = encoding_constants.MERGES.value
    SLOTS: gl.constexpr = LOOKAHEAD + 1
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    SAME_STRIDES: gl.constexpr = CACHE.k_page == CACHE.v_page and CACHE.k_token == CACHE.v_token
    gl.static_assert(gl.num_warps() == 1)

    # Scores are [tokens, rows], outputs [dimensions, rows].
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(1, MMA)
    # Sums of weights by thread: a result's rows are 8 threads' in turn.
    SUMS: gl.constexpr = gl.SliceLayout(
        0,
        gl.reshape(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA), [BLOCK_N // 8, 8, BLOCK_M])
        .type.layout,
    )  # fmt: skip
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    # 16 bytes a thread, whole rows side by side.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [1, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Rows that one query fills, rounded up to a power of two.
    QUERY_ROWS: gl.constexpr = (
        1 if GQA_GROUP == 1 else 2 if GQA_GROUP == 2 else 4 if GQA_GROUP <= 4
        else 8 if GQA_GROUP <= 8 else 16 if GQA_GROUP <= 16 else 32
    )  # fmt: skip

    if MODE.overlapped:
        gdc_launch_dependents()

    q_shared = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, HEAD_DIM], SHARED)
    k_shared = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, HEAD_DIM], SHARED)
    v_shared = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, HEAD_DIM], SHARED)

    # Results as whole rows: where the item's last block of K was, if they fit there.
    RESULT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    IN_PLACE: gl.constexpr = BLOCK_N >= 2 * BLOCK_M
    if not IN_PLACE:
        acc_shared = gl.allocate_shared_memory(gl.float32, [BLOCK_M, HEAD_DIM], RESULT)
    # Each row's maximum and sum.
    maximum_shared = gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN)
    total_shared = gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN)

    factor = scaling.scale
    if MODE.soft_cap:
        factor = 1.0

    work_end = gl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv
    work = gl.load(plan.tile_ptr + TILE.place) * HEADS.num_kv + gl.program_id(0)
    step = gl.num_programs(0)

    offs_n = gl.arange(0, BLOCK_N, layout=ONE_EACH)
    offs_m = gl.arange(0, BLOCK_M, layout=ROW)
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    token = gl.arange(0, BLOCK_N, layout=TOKEN)
    query_of_row = offs_m // GQA_GROUP

    # The range that is copied, by the number of its next block; the ones after it, of which each
    # is known by one link less. `page` and `ahead_page` are pages of the next block and the one
    # after that.
    copied_work = work
    block = 0
    entry, queries, row, listed, start, stop = read_item(
        work, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
    )
    next_entry, next_queries, next_row, next_listed, next_start, next_stop = read_item(
        work + step, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
    )
    later_entry, later_queries, later_row, later_listed, later_start, later_stop = read_item(
        work + 2 * step, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
    )
    last_entry, last_queries, last_row, last_listed, last_start, last_stop = read_item(
        work + 3 * step, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
    )
    table = _table(listed, tensors, strides, CACHE)
    length = _tokens(row, start, stop, tensors)
    next_table = _table(next_listed, tensors, strides, CACHE)
    next_length = _tokens(next_row, next_start, next_stop, tensors)
    later_table = _table(later_listed, tensors, strides, CACHE)
    later_length = _tokens(later_row, later_start, later_stop, tensors)
    page = _read_pages(table, start, length, 0, offs_n, BLOCK_N, CACHE.page_size)
    ahead_page = _read_pages(table, start, length, 1, offs_n, BLOCK_N, CACHE.page_size)
    next_page = _read_pages(
        next_table, next_start, next_length, 0, offs_n, BLOCK_N, CACHE.page_size
    )
    query = gl.load(plan.entry_query + entry + query_of_row, mask=query_of_row < queries, other=0)
    next_query = gl.load(
        plan.entry_query + next_entry + query_of_row, mask=query_of_row < next_queries, other=0
    )
    free = 0  # the buffers that are copied to
    q_free = 0

    # The item that is worked on, the one after it, and the links of a third.
    merged = gl.load(plan.segment_span + work // HEADS.num_kv, mask=work < work_end, other=0)
    own_entry, own_queries, own_length = entry, queries, length
    # What an item of one query needs of it at its end.
    own_query = gl.load(plan.entry_query + own_entry)
    own_slot = gl.load(plan.entry_slot + own_entry)
    coming_entry, coming_queries, coming_length = next_entry, next_queries, next_length
    link_entry, link_queries, link_row, link_start, link_stop = (
        later_entry, later_queries, later_row, later_start, later_stop,
    )  # fmt: skip
    left = own_length  # tokens of it that are to be worked on
    now = 0  # the buffers of the block that is worked on
    q_now = 0
    maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, COLUMN)
    total = gl.zeros([8, BLOCK_M], gl.float32, SUMS)
    acc = gl.zeros([HEAD_DIM, BLOCK_M], gl.float32, MMA)

    begun = 0
    while work < work_end:
        barrier()  # whatever was read from the buffers that are copied to now
        head = (copied_work % HEADS.num_kv).to(gl.int64)
        position = _positions(start, length, block, offs_n, BLOCK_N)
        k_offset = offsets_of(page, position, CACHE.k_page, CACHE.k_token, CACHE.page_size)
        v_offset = k_offset
        if not SAME_STRIDES:
            v_offset = offsets_of(page, position, CACHE.v_page, CACHE.v_token, CACHE.page_size)
        # Past the range's end its last token's rows: zeros would cost a mask a row.
        k_base = tensors.k + head * CACHE.k_head + offs_d
        v_base = tensors.v + head * CACHE.v_head + offs_d
        _copy_rows(k_shared.index(free), k_base, k_offset, length > 0, ROW)
        _copy_rows(v_shared.index(free), v_base, v_offset, length > 0, ROW)
        if block == 0:
            _copy_queries(
                q_shared.index(q_free), tensors.q, query, queries, copied_work % HEADS.num_kv,
                strides.q_batch, strides.q_head, offs_m, offs_d, GQA_GROUP,
            )  # fmt: skip
        commit_group()
        free = next_slot(free, SLOTS)
        block += 1
        page = ahead_page
        if block * BLOCK_N >= length:  # the next range
            block = 0
            q_free = next_slot(q_free, SLOTS)
            copied_work += step
            entry, queries, table, start, length = (
                next_entry, next_queries, next_table, next_start, next_length,
            )  # fmt: skip
            page, query = next_page, next_query
            next_entry, next_queries, next_table, next_start, next_length = (
                later_entry, later_queries, later_table, later_start, later_length,
            )  # fmt: skip
            next_page = _read_pages(
                next_table, next_start, next_length, 0, offs_n, BLOCK_N, CACHE.page_size
            )
            next_query = gl.load(
                plan.entry_query + next_entry + query_of_row,
                mask=query_of_row < next_queries,
                other=0,
            )
            later_entry, later_queries, later_start = last_entry, last_queries, last_start
            later_table = _table(last_listed, tensors, strides, CACHE)
            later_length = _tokens(last_row, last_start, last_stop, tensors)
            last_entry, last_queries, last_row, last_listed, last_start, last_stop = read_item(
                copied_work + 3 * step, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
            )
        ahead_page = _read_pages(table, start, length, block + 1, offs_n, BLOCK_N, CACHE.page_size)

        begun += 1
        if begun > LOOKAHEAD:
            wait_group(LOOKAHEAD)
            barrier()
            keys = k_shared.index(now).load(LEFT)
            q = q_shared.index(q_now).permute((1, 0)).load(RIGHT)
            scores = mma_v2(keys, q, gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA))
            scores = capped(scores, scaling, MODE.soft_cap)
            scores = gl.where((token < left)[:, None], scores, float("-inf"))
            new_maximum = gl.maximum(maximum, gl.reduce(scores, 0, larger) * factor)
            # An empty range keeps its maximum at -inf: avoid -inf - -inf.
            reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = gl.exp2(scores * factor - reference[None, :])
            rescale = gl.exp2(maximum - reference)
            added = gl.reduce(gl.reshape(weights, [BLOCK_N // 8, 8, BLOCK_M]), 0, plus)
            total = total * gl.convert_layout(rescale, gl.SliceLayout(0, SUMS))[None, :] + added
            maximum = new_maximum
            values = v_shared.index(now).permute((1, 0)).load(LEFT)
            weights = gl.convert_layout(weights.to(DTYPE), RIGHT)
            acc = mma_v2(values, weights, acc * rescale[None, :])
            if IN_PLACE:
                acc_shared = reinterpret(
                    k_shared.index(now), gl.float32, [BLOCK_N // 2, HEAD_DIM], RESULT
                ).slice(0, BLOCK_M)
            now = next_slot(now, SLOTS)
            left -= BLOCK_N

            if left <= 0:
                barrier()  # K has been read
                acc_shared.permute((1, 0)).store(acc)
                maximum_shared.store(maximum)
                total_shared.store(gl.reduce(total, 0, plus))
                barrier()
                if merged > 0:
                    if MODE.overlapped:
                        gdc_wait()
                    merge_results(
                        acc_shared, maximum_shared, total_shared, MERGES - own_slot,
                        own_query, work % HEADS.num_kv, merged, tensors, strides, offs_d, HEADS,
                        TILE, QUERY_ROWS, RESULT, COPY,
                    )  # fmt: skip
                else:
                    write_results(
                        acc_shared, maximum_shared.load(ROW), total_shared.load(ROW), own_entry,
                        own_queries, work % HEADS.num_kv, tensors, plan, strides, offs_m, offs_d,
                        HEADS, COPY,
                    )  # fmt: skip

                # The next item.
                work += step
                q_now = next_slot(q_now, SLOTS)
                own_entry, own_queries, own_length = coming_entry, coming_queries, coming_length
                own_query = gl.load(plan.entry_query + own_entry)
                own_slot = gl.load(plan.entry_slot + own_entry)
                merged = gl.load(
                    plan.segment_span + work // HEADS.num_kv, mask=work < work_end, other=0
                )
                coming_entry, coming_queries = link_entry, link_queries
                coming_length = _tokens(link_row, link_start, link_stop, tensors)
                link_entry, link_queries, link_row, _, link_start, link_stop = read_item(
                    work + 2 * step, work_end, tensors, plan, HEADS, CACHE, AHEAD=False
                )
                left = own_length
                maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, COLUMN)
                total = gl.zeros([8, BLOCK_M], gl.float32, SUMS)
                acc = gl.zeros([HEAD_DIM, BLOCK_M], gl.float32, MMA)

    wait_group(0)
    if MODE.overlapped:
        gdc_wait()

"""Both stages, launched over a plan on the device."""

from __future__ import annotations

import torch

from deft_backend.kernels.configurations import KernelConfiguration
from deft_backend.kernels.launches import Kind, launches_of
from deft_backend.planner import DevicePlan, Plan
from deft_backend.shapes.query_blocks import ONE_TOKEN, QueryBlocks

LOG2_E = 1.4426950408889634

WIDE_REACH = 1 << 36
"""Bytes of a cache that the Hopper kernels can address: 32 bits, in units of 16 bytes. A layer's
cache spans more if the host lays the pages of all layers together. Queries and outputs have half of
this limit: one bit says whether a result is an output or a partial result."""


def run_plan(
    config: KernelConfiguration,
    plan: DevicePlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    partial_scale: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float,
    exponent_bits: int = 0,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    host_plan: Plan | None,
    masked_tiles: bool,
    table_by_segment: bool,
    blocks: QueryBlocks = ONE_TOKEN,
    query_start: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> None:
    """Compute the attention of a batch over a plan.

    Parameters
    ----------
    q, out : [T, Hq, D]
        Query tokens and where the attention goes; the last dimension is contiguous.
    k_cache, v_cache : [pages, page_size, Hkv, D]
        The KV cache; the last dimension is contiguous.
    page_table : [rows, P] int
        Page ids.
    table_rows : [B] or [S] int
        Row of the page table of each request, or of each KV range of the plan.
    seq_lens : [B] int
        Current tokens of each request.
    partial_out : [E, Hq, D] float16 or float32; partial_lse, partial_scale : [E, Hq] float32
        The workspace for partial results, as :class:`~deft_backend.kernels.arguments.Partials`
        describes it: E counts query tokens.
    exponent_bits : int
        Of an element of a cache of 8 bits, given as uint8: 4 for e4m3, 5 for e5m2. 0: the cache has
        the dtype of the queries.
    k_scale, v_scale : float, or two tensors of one float32 on the device
        What a stored key and a stored value are multiplied with. 1.0 unless the cache has 8 bits.
    sinks : [Hq] float, optional
        The sink of each query head.
    host_plan : Plan, optional
        The plan in `plan`, if the CPU knows it. Then `run_plan` skips tile shapes without items,
        and stage 2 without partial results. With None, `run_plan` launches every kernel that
        a batch of this size may need, as a CUDA graph must.
    masked_tiles : bool
        Whether to launch masked tiles if the CPU does not know the plan.
    table_by_segment : bool
        Whether `table_rows` is by KV range. This spares every item a load that other loads wait
        for.
    blocks : QueryBlocks
        The query blocks of a request that the plan counts as its queries.
    query_start : [B + 1] int32, optional
        Index in `q` of each request's first query token; default: every request has
        `blocks.query_tokens` of them.
    ancestors : [B, query tokens, words] int64, optional
        Bits of a token tree; default: the query tokens are a chain.
    """
    # Structures of the kernels' arguments, in the order of their fields.
    partial = (partial_out, partial_lse, partial_scale)
    # Any tensor stands for one that the kernels do not read.
    starts = seq_lens if query_start is None else query_start
    bits = seq_lens if ancestors is None else ancestors
    held_sinks = partial_lse if sinks is None else sinks
    device_scales, held_scales = False, (partial_lse, partial_lse)
    if isinstance(k_scale, torch.Tensor) and isinstance(v_scale, torch.Tensor):
        device_scales, held_scales = True, (k_scale, v_scale)
    last = (page_table, table_rows, seq_lens, starts, bits, held_sinks, *held_scales)
    tensors = (q, k_cache, v_cache, out, partial, *last)
    pointers = 0
    for tensor in (q, k_cache, v_cache, out, *partial, *last):
        pointers |= tensor.data_ptr()
    aligned = pointers % 16 == 0
    bit_strides = (0, 0) if ancestors is None else ancestors.stride()[:2]
    strides = (*q.stride()[:2], *out.stride()[:2], page_table.stride(0), *bit_strides)
    requests = len(seq_lens)
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    kind = Kind(
        dtype=q.dtype,
        k_strides=k_cache.stride()[:3],
        v_strides=v_cache.stride()[:3],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        soft_cap=logit_cap > 0.0,
        wide_rows=aligned
        and all(stride % 8 == 0 for stride in strides[:4])
        and max(_reach(k_cache), _reach(v_cache)) <= WIDE_REACH
        and max(_reach(q), _reach(out)) <= WIDE_REACH // 2,
        table_by_segment=table_by_segment,
        blocks=blocks,
        ragged=query_start is not None,
        tree=ancestors is not None,
        exponent_bits=exponent_bits,
        sinks=sinks is not None,
        device_scales=device_scales,
    )
    launches = launches_of(config, kind)
    # What Triton compiles for, besides the constants.
    types = (
        q.device, page_table.dtype, table_rows.dtype, seq_lens.dtype, starts.dtype,
        held_sinks.dtype, strides,
    )  # fmt: skip

    # Scores in base 2, unless a soft cap needs them as they are.
    scale = float(sm_scale) if logit_cap > 0.0 else float(sm_scale) * LOG2_E
    value = 1.0
    if not device_scales:
        scale, value = scale * float(k_scale), float(v_scale)
    scaling = (scale, float(logit_cap) or 1.0, value)
    arguments = (tensors, plan.stage1, scaling, strides)
    follows = False
    queries = requests * blocks.blocks
    query_vectors = blocks.tokens * num_heads // num_kv_heads
    for shape, programs in _tiles_to_launch(
        config, host_plan, num_kv_heads, queries, query_vectors, masked_tiles
    ):
        launches.stage1[shape][follows].run(programs, arguments, types, aligned)
        follows = config.overlapped

    merged = queries if host_plan is None else len(host_plan.reduce_query)
    if merged == 0:
        return
    # The batch decides, because only the device knows how many results there are to merge. So the
    # same batch has the same results, whoever planned it.
    num_results = num_heads * blocks.tokens
    few = queries <= config.few_queries(num_results)
    reduce = config.few if few else config.reduce
    programs = min(reduce.programs, merged * reduce.blocks(num_results))
    launches.stage2[few].run(
        programs, (partial, out, held_sinks, plan.stage2, starts, *strides[2:4]), types, aligned
    )


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first page, or first row, to the end of its last one."""
    return int(tensor.shape[0] * tensor.stride(0) * tensor.element_size())


def _tiles_to_launch(
    config: KernelConfiguration,
    host_plan: Plan | None,
    num_kv_heads: int,
    queries: int,
    query_vectors: int,
    masked_tiles: bool,
) -> list[tuple[int, int]]:
    """Tile shapes to launch, with their programs. Small tiles come last and fill the free SMs.

    `query_vectors` is the number of vectors of a query that share a KV head. If they do not fit the
    small tile, the plan has no items of it. If the vectors of all queries fit the small tile, the
    plan has no items of other tile shapes.
    """
    group_rows = queries * query_vectors
    found = []
    for shape in range(len(config.tiles) - 1, -1, -1):
        programs = config.tiles[shape].programs
        if host_plan is not None:
            begin, end = host_plan.items_of(shape)
            if begin == end:
                continue
            programs = min(programs, (end - begin) * num_kv_heads)
        elif config.tiles[shape].block_segments > 1:
            if not masked_tiles:
                continue
        elif shape == 0:
            if query_vectors > config.tiles[0].height:
                continue
            programs = config.tiles[0].programs_for(queries, num_kv_heads)
        elif group_rows <= config.tiles[0].height:
            continue
        elif group_rows <= config.tiles[shape].height:
            programs = config.tiles[shape].programs_for_one_tile or programs
        found.append((shape, programs))
    return found

"""Both stages: a step's tensors, from the host's call to the launches over a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deft_backend.kernels.arguments import CacheLayout, Partials, Scaling, Strides, Tensors
from deft_backend.kernels.configurations import EXPONENT_BITS, KernelConfiguration
from deft_backend.kernels.launches import Kind, Launch, heads_of, launches_of
from deft_backend.kernels.layer_launches import LayerLaunches
from deft_backend.planner import DevicePlan, Plan
from deft_backend.shapes import ONE_TOKEN, ORDERED, QueryBlocks

LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class Step:
    """The tensors of a planned batch's attention in one layer, on the attention's device."""

    # [T, Hq, D]: query tokens and where the attention goes; the last dimension is contiguous.
    q: torch.Tensor
    # [pages, page_size, Hkv, D]: the KV cache; the last dimension is contiguous.
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    page_table: torch.Tensor  # [rows, P] int: page ids
    seq_lens: torch.Tensor  # [B] int: current tokens of each request
    table_rows: torch.Tensor  # [segments] int32: row of the page table of each KV range of the plan
    # [B + 1] int32: index in `q` of each request's first query token; None: all requests have
    # equally many.
    query_start: torch.Tensor | None
    # [B, query tokens, words] int64: bits of a token tree; None: the query tokens are a chain.
    ancestors: torch.Tensor | None
    sinks: torch.Tensor | None  # [Hq] float: the sink of each query head
    # What a stored key and a stored value are multiplied with. 1.0 unless the cache has 8 bits.
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    # Scale of the scores, and their soft cap; a cap of 0 is none.
    sm_scale: float
    logit_cap: float

    @property
    def device_scales(self) -> bool:
        return isinstance(self.k_scale, torch.Tensor)

    def tensors(self, partial: Partials) -> Tensors:
        """What the kernels take.

        A launch passes an address for each field. For a tensor that the step lacks, and that the
        kernels therefore do not read, it passes the address of `partial.lse`.
        """
        lse = partial.lse
        on_device = self.device_scales
        return Tensors(
            self.q,
            self.k_cache,
            self.v_cache,
            self.out,
            partial,
            self.page_table,
            self.table_rows,
            self.seq_lens,
            lse if self.query_start is None else self.query_start,
            lse if self.ancestors is None else self.ancestors,
            lse if self.sinks is None else self.sinks,
            self.k_scale if on_device else lse,
            self.v_scale if on_device else lse,
        )

    def strides(self) -> Strides:
        q_batch, q_head, _ = self.q.stride()
        out_batch, out_head, _ = self.out.stride()
        batch, token = (0, 0) if self.ancestors is None else self.ancestors.stride()[:2]
        return Strides(
            q_batch, q_head, out_batch, out_head, self.page_table.stride(0), batch, token
        )

    def scaling(self) -> Scaling:
        """The scales that the CPU knows; scores are in base 2 unless a soft cap needs them as they
        are."""
        scale = float(self.sm_scale) if self.logit_cap > 0.0 else float(self.sm_scale) * LOG2_E
        cap = float(self.logit_cap) or 1.0
        if self.device_scales:
            return Scaling(scale, cap, 1.0)
        return Scaling(scale * float(self.k_scale), cap, float(self.v_scale))


_LAUNCH_ORDER = (2, 1, ORDERED, 0)

_Repeated = tuple[Launch, int, tuple[Any, ...]]
"""A launch, its programs, and its arguments behind those that a layer gives."""

WIDE_REACH = 1 << 36
"""Bytes of a cache that the Hopper kernels can address: 32 bits, in units of 16 bytes. A layer's
cache spans more if the host lays the pages of all layers together. Queries and outputs have half of
this limit: one bit says whether a result is an output or a partial result."""


def run_plan(
    config: KernelConfiguration,
    plan: DevicePlan,
    step: Step,
    partial: Partials,
    *,
    blocks: QueryBlocks = ONE_TOKEN,
    known_plan: Plan | None,
    masked_tiles: bool,
) -> LayerLaunches | None:
    """Compute the attention of a step over a plan.

    Returns what repeats it for other layers; None if it cannot be repeated.

    - `partial`: the workspace, which counts query tokens.
    - `blocks`: the query blocks of a request that the plan counts as its queries.
    - `known_plan`: the plan in `plan`, if the CPU knows it. Then `run_plan` skips tile shapes
      without items, and stage 2 without partial results. With None, `run_plan` launches every
      kernel that a batch of this size may need, as a CUDA graph must.
    - `masked_tiles`: whether to launch masked tiles if the CPU does not know the plan.
    """
    exponent_bits = EXPONENT_BITS.get(step.k_cache.dtype, 0)
    if exponent_bits:  # the kernels read bytes
        step.k_cache = step.k_cache.view(torch.uint8)
        step.v_cache = step.v_cache.view(torch.uint8)
    tensors, strides = step.tensors(partial), step.strides()
    rows = others = 0
    for tensor in (*tensors[:4], *partial):
        rows |= tensor.data_ptr()
    for tensor in tensors[5:]:
        others |= tensor.data_ptr()
    aligned = (rows | others) % 16 == 0
    # Integers of the batch do not choose the kernel: a slice of them has the same bits.
    kind = _kind(step, strides, rows % 16 == 0, blocks, exponent_bits)
    launches = launches_of(config, kind)
    # What Triton compiles for, besides the constants.
    dtypes = (tensors.page_table.dtype, tensors.seq_lens.dtype, tensors.query_start.dtype)
    types = (tensors.q.device, *dtypes, tensors.sinks.dtype, strides)
    # Launches take structures as plain tuples.
    plain = (*tensors[:4], tuple(partial), *tensors[5:])
    arguments = (plain, plan.stage1, tuple(step.scaling()), tuple(strides))
    follows, repeated = False, list[_Repeated]()
    queries = len(step.seq_lens) * blocks.blocks
    heads = kind.heads
    for shape, programs in _tiles_to_launch(
        config, known_plan, heads.num_kv, queries, heads.vectors, masked_tiles
    ):
        launch = launches.stage1[shape][follows]
        launch.run(programs, arguments, types, aligned)
        repeated.append((launch, programs, arguments[1:]))
        follows = config.overlapped

    merged = queries if known_plan is None else len(known_plan.reduce_query)
    if merged == 0:
        return _repeatable(plain, repeated, None, types) if aligned else None
    # The batch decides, because only the device knows how many results there are to merge. So the
    # same batch has the same results, whoever planned it.
    num_results = heads.num_kv * heads.vectors
    few = queries <= config.few_queries(num_results)
    reduce = config.few if few else config.reduce
    programs = min(reduce.programs, merged * reduce.blocks(num_results))
    out = (strides.out_batch, strides.out_head)
    of_stage2 = (tuple(partial), tensors.out, tensors.sinks, plan.stage2, tensors.query_start, *out)
    launch = launches.stage2[few]
    launch.run(programs, of_stage2, types, aligned)
    merges = (launch, programs, of_stage2[3:])
    return _repeatable(plain, repeated, merges, types) if aligned else None


def _repeatable(
    tensors: tuple[Any, ...],
    stage1: list[_Repeated],
    stage2: _Repeated | None,
    types: tuple[Any, ...],
) -> LayerLaunches | None:
    """What repeats these launches, if all their kernels are compiled."""
    found = []
    for launch, programs, rest in [*stage1, *([] if stage2 is None else [stage2])]:
        runner = launch.runner(programs, types)
        if runner is None:
            return None
        found.append((runner, (*rest, *launch.constants.values())))
    merges = None if stage2 is None else found.pop()
    return LayerLaunches(tensors, found, merges)


def _kind(
    step: Step, strides: Strides, aligned: bool, blocks: QueryBlocks, exponent_bits: int
) -> Kind:
    num_tokens, num_heads, head_dim = step.q.shape
    pages, page_size, num_kv_heads, _ = step.k_cache.shape
    page, token, head, _ = step.k_cache.stride()
    # From the first page, or the first row, to the end of the last one.
    cache_bytes = pages * page * step.k_cache.itemsize
    rows_bytes = num_tokens * max(strides.q_batch, strides.out_batch) * step.q.itemsize
    row_strides = strides.q_batch | strides.q_head | strides.out_batch | strides.out_head
    return Kind(
        dtype=step.q.dtype,
        heads=heads_of(
            num_heads,
            num_kv_heads,
            head_dim,
            blocks,
            step.query_start is not None,
            step.ancestors is not None,
        ),
        cache=CacheLayout(page_size, page, token, head, exponent_bits),
        soft_cap=step.logit_cap > 0.0,
        wide_rows=aligned
        and row_strides % 8 == 0
        and cache_bytes <= WIDE_REACH
        and rows_bytes <= WIDE_REACH // 2,
        sinks=step.sinks is not None,
        device_scales=step.device_scales,
    )


def _tiles_to_launch(
    config: KernelConfiguration,
    known_plan: Plan | None,
    num_kv_heads: int,
    queries: int,
    query_vectors: int,
    masked_tiles: bool,
) -> list[tuple[int, int]]:
    """Tile shapes to launch, with their programs. Small tiles come last and fill the free SMs;
    ordered tiles come after large tiles, which have the longest items.

    `query_vectors` is the number of vectors of a query that share a KV head. If they do not fit the
    small tile, the plan has no items of it. If the vectors of all queries fit the small tile, the
    plan has no items of other tile shapes.
    """
    group_rows = queries * query_vectors
    found = []
    for shape in (shape for shape in _LAUNCH_ORDER if shape < len(config.tiles)):
        programs = config.tiles[shape].programs
        if known_plan is not None:
            begin, end = known_plan.items_of(shape)
            if begin == end:
                continue
            if shape == 0:  # as many as the planner expects
                programs = config.tiles[0].programs_for(queries, num_kv_heads)
            programs = min(programs, (end - begin) * num_kv_heads)
        elif config.tiles[shape].block_segments > 1:
            if not masked_tiles:
                continue
        elif shape == 0:
            if query_vectors > config.tiles[0].height:
                continue
            programs = config.tiles[0].programs_for(queries, num_kv_heads)
        elif group_rows <= config.tiles[0].height and not config.fixed_tiles:
            continue
        elif shape == ORDERED:
            if queries < config.tiles[ORDERED].fewest_queries:
                continue
        elif group_rows <= config.tiles[shape].height:
            programs = config.tiles[shape].programs_for_one_tile or programs
        found.append((shape, programs))
    return found

"""Both stages, launched over a plan on the device."""

from __future__ import annotations

import torch
import triton

from deft_backend.kernels.launch import LaunchConfig
from deft_backend.planner import DevicePlan, Plan


def run_plan(
    config: LaunchConfig,
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
    *,
    sm_scale: float,
    logit_cap: float,
    host_plan: Plan | None,
    masked: bool,
) -> None:
    """Compute decode attention of a batch over a plan.

    Parameters
    ----------
    q, out : [B, Hq, D]
        Queries and where the attention goes; the last dimension is contiguous.
    k_cache, v_cache : [pages, page_size, Hkv, D]
        The KV cache; the last dimension is contiguous.
    page_table : [rows, P] int
        Page ids.
    table_rows : [B] int
        Row of the page table of each batch row.
    seq_lens : [B] int
        Current tokens of each batch row.
    partial_out : [E, Hq, D] float32, partial_lse : [E, Hq] float32
        Workspace for partial results.
    host_plan : Plan, optional
        What is in `plan`: lets tile shapes without items and a reduction without partial results
        be skipped. None launches everything, as a captured graph must.
    masked : bool
        Whether items may have several segments and bit causal masks.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    padded = triton.next_power_of_2(head_dim)
    # Without tensor-core rounding for float32: the answer of the host's own kernel is exact too.
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    stage1 = config.stage1()
    for shape, tile in enumerate(config.tiles):
        programs = tile.programs
        if host_plan is not None:
            items = int(host_plan.tile_ptr[shape + 1] - host_plan.tile_ptr[shape])
            if items == 0:
                continue
            programs = min(programs, items * num_kv_heads)
        stage1[(programs,)](
            q,
            k_cache,
            v_cache,
            out,
            partial_out,
            partial_lse,
            page_table,
            table_rows,
            seq_lens,
            plan["tile_ptr"],
            plan["item_segment_ptr"],
            plan["item_query_ptr"],
            plan["segment_row"],
            plan["segment_start"],
            plan["segment_end"],
            plan["segment_mask"],
            plan["mask_words"],
            plan["entry_query"],
            plan["entry_slot"],
            sm_scale,
            logit_cap if logit_cap > 0.0 else 1.0,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            v_cache.stride(0),
            v_cache.stride(1),
            v_cache.stride(2),
            out.stride(0),
            out.stride(1),
            page_table.stride(0),
            TILE=shape,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.block_tokens,
            NUM_KV_HEADS=num_kv_heads,
            GQA_GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=padded,
            PAGE_SIZE=k_cache.shape[1],
            MASKED=masked,
            SOFT_CAP=logit_cap > 0.0,
            PRECISION=precision,
            UPCAST=config.interpreted,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    programs = config.reduce_programs
    if host_plan is not None:
        if len(host_plan.reduce_query) == 0:
            return
        programs = min(programs, len(host_plan.reduce_query) * num_heads)
    config.stage2()[(programs,)](
        partial_out,
        partial_lse,
        out,
        plan["num_reduce"],
        plan["reduce_query"],
        plan["reduce_ptr"],
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded,
        BLOCK_P=16,
        BLOCK_H=config.reduce_heads,
        num_warps=4,
    )

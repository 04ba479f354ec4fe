"""Both stages, launched over a plan on the device."""

from __future__ import annotations

import torch
import triton

from deft_backend.kernels.launch import PARTIAL_ATTENTION, REDUCE_PARTIALS, LaunchConfig
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
    num_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    padded = triton.next_power_of_2(head_dim)
    tensors = (q, k_cache, v_cache, out, partial_out, partial_lse, page_table, table_rows, seq_lens)
    strides = (
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        page_table.stride(0),
    )
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    aligned = pointers % 16 == 0
    kind = (
        q.device, q.dtype, page_table.dtype, table_rows.dtype, seq_lens.dtype,
        strides, num_heads, num_kv_heads, head_dim, page_size, masked, logit_cap > 0.0,
    )  # fmt: skip

    arguments = (
        *tensors, *plan.stage1, float(sm_scale), float(logit_cap) or 1.0, *strides
    )  # fmt: skip
    for shape, tile in enumerate(config.tiles):
        programs = tile.programs
        if host_plan is not None:
            items = int(host_plan.tile_ptr[shape + 1] - host_plan.tile_ptr[shape])
            if items == 0:
                continue
            programs = min(programs, items * num_kv_heads)
        PARTIAL_ATTENTION.launch(
            programs,
            arguments,
            {
                "TILE": shape,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.block_tokens,
                "NUM_KV_HEADS": num_kv_heads,
                "GQA_GROUP": num_heads // num_kv_heads,
                "HEAD_DIM": head_dim,
                "HEAD_DIM_PADDED": padded,
                "PAGE_SIZE": page_size,
                "MASKED": masked,
                "SOFT_CAP": logit_cap > 0.0,
                # Without tensor-core rounding for float32: the host's own answer is exact, too.
                "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
                "UPCAST": config.interpreted,
            },
            variant=(shape, tile, kind),
            aligned=aligned,
            interpreted=config.interpreted,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    programs = config.reduce_programs
    if host_plan is not None:
        if len(host_plan.reduce_query) == 0:
            return
        programs = min(programs, len(host_plan.reduce_query) * num_heads)
    REDUCE_PARTIALS.launch(
        programs,
        (partial_out, partial_lse, out, *plan.stage2, *out.stride()[:2]),
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": padded,
            "BLOCK_P": 16,
            "BLOCK_H": config.reduce_heads,
        },
        variant=(config.reduce_heads, kind),
        aligned=aligned,
        interpreted=config.interpreted,
        num_warps=4,
    )

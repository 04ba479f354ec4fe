"""Both stages, launched over a plan on the device."""

from __future__ import annotations

from typing import Any

import torch
import triton

from deft_backend.kernels.launch import (
    LEAF_ATTENTION,
    PARTIAL_ATTENTION,
    REDUCE_PARTIALS,
    STEM_ATTENTION,
    LaunchConfig,
)
from deft_backend.planner import DevicePlan, Plan
from deft_backend.triton_kernel import Kernel

LOG2_E = 1.4426950408889634


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
    partial_scale: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float,
    host_plan: Plan | None,
    packed: bool,
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
    partial_out : [E, Hq, D] float16 or float32; partial_lse, partial_scale : [E, Hq] float32
        Workspace for partial results: outputs over their rows' largest elements, and those.
    host_plan : Plan, optional
        What is in `plan`: lets tile shapes without items and a reduction without partial results
        be skipped. None launches everything, as a captured graph must.
    packed : bool
        Whether, without a host plan, items of several KV ranges are launched, too.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    padded = triton.next_power_of_2(head_dim)
    tensors = (
        q, k_cache, v_cache, out, partial_out, partial_lse, partial_scale,
        page_table, table_rows, seq_lens,
    )  # fmt: skip
    strides = (*q.stride()[:2], *out.stride()[:2], page_table.stride(0))
    # Layouts of the cache are few and last: compiled in, address arithmetic takes half as long.
    names = ("PAGE", "TOKEN", "HEAD")
    layout = {
        **{f"STRIDE_K_{n}": s for n, s in zip(names, k_cache.stride(), strict=False)},
        **{f"STRIDE_V_{n}": s for n, s in zip(names, v_cache.stride(), strict=False)},
    }
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    aligned = pointers % 16 == 0
    # The Hopper kernel reads 16 bytes at a time, whatever the row.
    wide = aligned and all(s % 8 == 0 for s in (*q.stride()[:2], *layout.values()))
    kind = (
        q.device, q.dtype, page_table.dtype, table_rows.dtype, seq_lens.dtype,
        strides, *layout.values(), num_heads, num_kv_heads, head_dim, page_size, logit_cap > 0.0,
    )  # fmt: skip

    # Scores in base 2, unless a soft cap needs them as they are.
    scale = float(sm_scale) if logit_cap > 0.0 else float(sm_scale) * LOG2_E
    arguments = (*tensors, *plan.stage1, scale, float(logit_cap) or 1.0, *strides)
    launches = _tiles_to_launch(config, host_plan, num_kv_heads, packed)
    merges = host_plan is None or len(host_plan.reduce_query) > 0
    for nth, (shape, programs) in enumerate(launches):
        tile = config.tiles[shape]
        follows = config.overlapped and nth > 0
        shared = {
            **layout,
            "TILE": shape,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.block_tokens,
            "NUM_KV_HEADS": num_kv_heads,
            "GQA_GROUP": num_heads // num_kv_heads,
            "HEAD_DIM": head_dim,
            "PAGE_SIZE": page_size,
            "SOFT_CAP": logit_cap > 0.0,
            "OVERLAPPED": config.overlapped,
        }
        options: dict[str, int | bool] = {
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "launch_pdl": follows,
        }
        variant = (shape, tile, follows, kind)
        if tile.lookahead and wide:
            constants = _in_order(STEM_ATTENTION, {**shared, "LOOKAHEAD": tile.lookahead})
            STEM_ATTENTION.launch(
                programs, arguments, constants,
                variant=variant, aligned=aligned, interpreted=False, **options,
            )  # fmt: skip
            continue
        constants = {
            **shared,
            "BLOCK_S": tile.block_segments,
            "HEAD_DIM_PADDED": padded,
            # Without tensor-core rounding for float32: the host's own answer is exact, too.
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            "UPCAST": config.interpreted,
        }
        kernel = LEAF_ATTENTION if shape == 0 else PARTIAL_ATTENTION
        kernel.launch(
            programs, arguments, _in_order(kernel, constants),
            variant=variant, aligned=aligned, interpreted=config.interpreted, **options,
        )  # fmt: skip

    if not merges:
        return
    reduce = config.reduce
    programs = reduce.programs
    if host_plan is not None:
        programs = min(programs, len(host_plan.reduce_query) * -(-num_heads // reduce.heads))
    REDUCE_PARTIALS.launch(
        programs,
        (partial_out, partial_lse, partial_scale, out, *plan.stage2, *out.stride()[:2]),
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": padded,
            "BLOCK_P": reduce.partials,
            "BLOCK_H": reduce.heads,
            "OVERLAPPED": config.overlapped,
        },
        variant=(reduce, kind),
        aligned=aligned,
        interpreted=config.interpreted,
        num_warps=reduce.num_warps,
        num_stages=3,
        launch_pdl=config.overlapped,
    )


def _in_order(kernel: Kernel, constants: dict[str, Any]) -> dict[str, Any]:
    """Constants in the order of the kernel's parameters, as the fast path passes them."""
    return {name: constants[name] for name in kernel.constants}


def _tiles_to_launch(
    config: LaunchConfig, host_plan: Plan | None, num_kv_heads: int, packed: bool
) -> list[tuple[int, int]]:
    """Tile shapes with their programs, large tiles first: small ones fill what they leave free."""
    found = []
    for shape in range(len(config.tiles) - 1, -1, -1):
        programs = config.tiles[shape].programs
        if host_plan is not None:
            items = int(host_plan.tile_ptr[shape + 1] - host_plan.tile_ptr[shape])
            if items == 0:
                continue
            programs = min(programs, items * num_kv_heads)
        elif config.tiles[shape].block_segments > 1 and not packed:
            continue
        found.append((shape, programs))
    return found

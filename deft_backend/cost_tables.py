"""The cost table for a device: what :mod:`deft_backend.policies.tables` asks for, gathered here."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from deft_backend import planner
from deft_backend.folders import tables_directory
from deft_backend.installed import installed_version
from deft_backend.jit import digest_of
from deft_backend.policies import CostModel
from deft_backend.policies.tables import TableKey, cost_model_for


def table_key(
    device: torch.device,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 1,
) -> TableKey:
    """Key of the cost table for an attention on `device`, with what is installed here."""
    from deft_backend import __version__

    return TableKey(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        package=__version__,
        kernels=kernels_digest(),
        torch=torch.__version__,
        triton=installed_version("triton") or "unknown",
        query_heads=num_query_heads,
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        page_size=page_size,
    )


def cost_model_on(
    device: torch.device,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 1,
) -> CostModel:
    """The cost table to plan with on `device`; see :func:`cost_model_for` for what is logged."""
    key = table_key(device, num_query_heads, num_kv_heads, head_dim, dtype, page_size)
    return cost_model_for(key, tables_directory())


@lru_cache(maxsize=1)
def kernels_digest() -> str:
    """Digest of what decides how long an item takes: the kernels, and the tiles they run in."""
    package = Path(__file__).parent
    tiles = Path(planner.__file__).parent / "plan.py"
    return digest_of([*sorted((package / "kernels").rglob("*.py")), tiles])[:16]

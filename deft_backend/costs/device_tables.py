"""The cost table of a device: the key for :mod:`deft_backend.costs.table_lookup`."""

from functools import lru_cache

import torch

from deft_backend.compile.source_digest import digest_of
from deft_backend.costs.cost_model import CostModel
from deft_backend.costs.gpu_facts import gpu_facts
from deft_backend.costs.table_key import TableKey
from deft_backend.costs.table_lookup import cost_model_for
from deft_backend.files.folders import tables_directory
from deft_backend.settings.version import VERSION, installed_version


def table_key(
    device: torch.device, num_query_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, page_size: int = 1,
) -> TableKey:  # fmt: skip
    """Key of the cost table for an attention on `device`, with the installed versions."""
    return TableKey(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        package=VERSION,
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
    device: torch.device, num_query_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, page_size: int = 1,
) -> CostModel:  # fmt: skip
    """The cost table to plan with on `device`; :func:`cost_model_for` describes the log lines."""
    key = table_key(device, num_query_heads, num_kv_heads, head_dim, dtype, page_size)
    return cost_model_for(key, tables_directory(), gpu_facts(device))


@lru_cache(maxsize=1)
def kernels_digest() -> str:
    """Digest of the sources that decide an item's time: the kernels and their limits."""
    return digest_of(["kernels", "shapes/kernel_limits.py", "planner/encoding.py"])[:16]

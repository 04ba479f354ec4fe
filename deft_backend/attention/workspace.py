"""Memory for the partial results of stage 1, at addresses that CUDA graphs can hold."""

import torch

from deft_backend.kernels import Partials
from deft_backend.policies.makespan import partial_result_bytes


def allocate_workspace(
    entries: int, num_query_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Partials:
    """Room for the partial results of `entries` query tokens of items, for operands of `dtype`."""
    # After division by the largest element, float16 keeps 11 bits of mantissa for any range of
    # values.
    held = torch.float32 if dtype == torch.float32 else torch.float16
    out = torch.empty((entries, num_query_heads, head_dim), dtype=held, device=device)
    lse, scale = torch.empty((2, entries, num_query_heads), dtype=torch.float32, device=device)
    return Partials(out, lse, scale)


def entry_bytes(num_query_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one entry's partial result."""
    return partial_result_bytes(num_query_heads, head_dim, dtype.itemsize)

"""Memory for the partial results of stage 1."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deft_backend.policies.makespan import partial_result_bytes


class Workspace(NamedTuple):
    """Partial results on the device, at addresses that never change, because CUDA graphs hold them.

    Attributes
    ----------
    out : [E, Hq, D] float16 or float32
        Outputs, each divided by its scale.
    lse, scale : [E, Hq] float32
        Log-sum-exp of the scores, and scales: the largest element of each output.
    """

    out: torch.Tensor
    lse: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def allocate(
        cls,
        entries: int,
        num_query_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Workspace:
        """Room for the partial results of `entries` queries of items, for operands of `dtype`."""
        out = torch.empty(
            (entries, num_query_heads, head_dim), dtype=_out_dtype(dtype), device=device
        )
        lse, scale = torch.empty((2, entries, num_query_heads), dtype=torch.float32, device=device)
        return cls(out, lse, scale)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)

    def poison(self) -> None:
        """Fill it with NaN, so that a read before a write shows in the output."""
        for tensor in self:
            tensor.fill_(float("nan"))


def entry_bytes(num_query_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one entry's partial result."""
    return partial_result_bytes(num_query_heads, head_dim, dtype.itemsize)


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    # After division by the largest element, float16 keeps 11 bits of mantissa for any range of
    # values.
    return torch.float32 if dtype == torch.float32 else torch.float16

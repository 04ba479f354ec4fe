"""What tensors must be like before kernels see them; errors name what was found and expected."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class AttentionError(ValueError):
    """An attention that the kernels cannot run, or tensors that do not fit the plan."""


def check_operands(
    tensors: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], dtype: torch.dtype
) -> None:
    """Refuse queries, outputs and caches of another shape or dtype, or with gaps in a head.

    Parameters
    ----------
    tensors : mapping
        Each by its name, with the shape that it must have.
    dtype : torch.dtype

    Raises
    ------
    AttentionError
        For the first that does not fit.
    """
    for name, (tensor, expected) in tensors.items():
        if tuple(tensor.shape) != expected:
            raise AttentionError(
                f"{name} has shape {list(tensor.shape)}; expected {list(expected)}"
            )
        if tensor.dtype != dtype:
            raise AttentionError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
        if tensor.stride(-1) != 1:
            raise AttentionError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1"
            )


def check_table(page_table: torch.Tensor) -> None:
    """Refuse page tables that are not [rows, pages] with contiguous rows."""
    if page_table.dim() != 2 or page_table.stride(1) != 1:
        raise AttentionError(
            f"page_table has shape {list(page_table.shape)} and strides {page_table.stride()}; "
            "expected [rows, pages] with contiguous rows"
        )


def check_integers(**tensors: torch.Tensor) -> None:
    """Refuse dtypes other than int32 and int64."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise AttentionError(f"{name} has dtype {tensor.dtype}; expected int32 or int64")


def check_device(device: torch.device, **tensors: torch.Tensor) -> None:
    """Refuse tensors that lie elsewhere."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise AttentionError(f"{name} is on {tensor.device}; expected {device}")

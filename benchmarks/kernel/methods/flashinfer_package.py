"""FlashInfer, if it is installed: the parts that both of its wrappers need."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

_WORKSPACE_BYTES = 512 << 20


def flashinfer_unavailable(device: torch.device) -> str | None:
    """Why FlashInfer cannot run on `device`, in one line; None if it can."""
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    try:
        flashinfer()
    except Exception as error:  # a broken installation may raise anything
        return f"flashinfer cannot be imported: {error}".splitlines()[0]
    return None


@cache
def flashinfer() -> ModuleType:
    """The package, which is not a dependency."""
    return import_module("flashinfer")


@cache
def float_workspace(device: torch.device) -> torch.Tensor:
    """One workspace for both wrappers, which never run at the same time."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def flashinfer_origin() -> str:
    return f"flashinfer {flashinfer().__version__}"

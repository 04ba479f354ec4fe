"""Launches and copies go to PyTorch's current device, even if the tensors are on another one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_current(device: torch.device) -> bool:
    """Whether `device` is the current device; True for the CPU."""
    return device.type != "cuda" or torch.cuda.current_device() == device.index


def device_as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current device in the `with` block; free if it is already."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)

"""Which GPU launches and copies go to: PyTorch's current device, whatever the tensors' device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_current(device: torch.device) -> bool:
    """Whether launches go to `device` already; True for the CPU."""
    return device.type != "cuda" or torch.cuda.current_device() == device.index


def device_as_current(device: torch.device) -> AbstractContextManager[object]:
    """Send launches and copies to `device` in the `with` block; free if they go there already."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)

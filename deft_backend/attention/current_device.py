"""Launches and copies go to PyTorch's current device, even if the tensors are on another one."""

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS = nullcontext()


def numbered(device: torch.device | str) -> torch.device:
    """The device; for CUDA without a number, the current one."""
    found = torch.device(device)
    if found == torch.device("cuda"):
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def device_as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current device in the `with` block; free if it is, or is the CPU."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _AS_IT_IS
    return torch.cuda.device(device)

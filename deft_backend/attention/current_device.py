"""Launches and copies go to PyTorch's current device, even if the tensors are on another one."""

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS = nullcontext()


def device_as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current device in the `with` block; free if it is, or is the CPU."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _AS_IT_IS
    return torch.cuda.device(device)

"""Random weights for a model whose ``config.json`` is all there is of it.

The hosts make up weights for ``--load-format dummy``. These are so small that attention does not
change an answer. Here the host makes the model, and this module fills it: answers then depend on
every layer and on every part of the KV cache.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

SHARPNESS = 1.5
"""Scale of the projections to queries and keys: attention is neither uniform nor one-hot."""

ROUTING = 8.0
"""Scale of the routers to experts, so that two experts are seldom nearly equally good. Rounding
would choose between such experts, and another expert gives another answer."""

EXPERTS = 0.1
"""Scale of what experts add to the residual: another expert, which rounding chose after all, then
changes an answer little. Attention adds as much as in models without experts."""

_ONES = ("norm", "layernorm")
_ZEROS = ("bias", "correction")
_LAST_OF_EXPERTS = ("w2", "down_proj")


def fill(model: Any) -> None:
    """Replace a model's parameters. They depend on each parameter's name and shape alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.copy_(_values(name, parameter))


def _values(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Values of the parameter's shape, in float32 on its device."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = tuple(parameter.shape)
    normal = torch.randn(shape, generator=generator)
    part = name.rsplit(".", 2)[-2:]
    if "sink" in name:
        return normal + 1.0
    if len(shape) < 2:
        if any(word in name for word in _ONES) and part[-1] == "weight":
            return torch.ones(shape)
        if any(word in part[-1] for word in _ZEROS) and "dt" not in part[-1]:
            return torch.zeros(shape)
        return 0.5 * normal
    if "embed" in name:
        return normal
    width = shape[-1] if "conv" not in name else shape[-1] * shape[-2]
    scale = 3.0 if "lm_head" in name else SHARPNESS if "qkv" in name else 1.0
    if "router" in name or name.endswith(".gate.weight"):
        scale = ROUTING
    if "experts" in name and any(word in name for word in _LAST_OF_EXPERTS):
        scale = EXPERTS
    return normal.mul_(scale * width**-0.5)

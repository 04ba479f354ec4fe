"""Which planner makes a server's plans: the host planner or the device planner."""

from __future__ import annotations

import logging

import torch

from deft_backend.config import Settings
from deft_backend.planner.on_device import largest_batch
from deft_backend.policy_names import AUTO

logger = logging.getLogger("deft_backend")

CHEAP_WITHOUT_SHARING = frozenset({((9, 0), 32, 8, 128)})
"""Compute capability, query heads, KV heads and head dimension for which ``DEFT_PLANNER=auto``
selects the device planner.

The device planner sends every batch through tree attention, the host planner only batches that
share enough. On these GPUs and shapes, batches that share nothing lose hardly anything. In two runs
they took 0.3 % less time per token than with the host's kernel, and in a third run 2.7 % more.
"""


def selects_device_planner(
    settings: Settings, device: torch.device, shape: tuple[int, int, int]
) -> bool:
    """Whether the device planner makes the plans of an adapter that can use either planner.

    If ``DEFT_PLANNER`` selects a device planner that cannot be used, the log gives the reason.

    Parameters
    ----------
    settings : Settings
    device : torch.device
        The one that decodes.
    shape : tuple of int
        Query heads, KV heads and head dimension.
    """
    if settings.planner == "host":
        return False
    if settings.planner == "auto":
        return (
            device.type == "cuda" and settings.policy == AUTO and not settings.verify
            and (torch.cuda.get_device_capability(device), *shape) in CHEAP_WITHOUT_SHARING
        )  # fmt: skip
    for reason, holds in (
        (f"the device planner knows the policy {AUTO} only, not {settings.policy}",
         settings.policy != AUTO),
        ("DEFT_VERIFY checks plans of the host planner only", settings.verify),
    ):  # fmt: skip
        if holds:
            logger.warning("deft: %s; the host planner makes the plans", reason)
            return False
    return True


def policy_selects_device_planner(settings: Settings) -> bool:
    """Whether the device planner makes the plans of an adapter that ignores ``DEFT_PLANNER``.

    Such an adapter (vLLM's) uses the device planner with every policy that the planner knows.
    """
    return settings.policy == AUTO


def planned_on_device(requests: int) -> int:
    """The largest batch that the device planner is set up to plan.

    The log says if that is smaller than `requests`, the largest batch that the server decodes.
    """
    if requests > largest_batch():
        logger.warning(
            "deft: DEFT_MAX_BATCH asks for batches of up to %d requests, but the device planner "
            "holds %d; the host's kernel decodes larger batches", requests, largest_batch(),
        )  # fmt: skip
    return min(requests, largest_batch())

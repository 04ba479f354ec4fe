"""A GPU's abilities, and the largest batch that the device planner holds."""

import logging

import torch

from deft_backend.planner.on_device import largest_batch
from deft_backend.shapes import QueryBlocks

logger = logging.getLogger("deft_backend")

HOPPER = (9, 0)  # the compute capability of H100 and H200


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """A GPU's compute capability; None for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def planned_on_device(requests: int, query_tokens: int = 1, gqa_group: int = 1) -> int:
    """The largest batch that the device planner is set up to plan.

    The log says if that is smaller than `requests`, the largest batch that the server decodes.
    `query_tokens` is of a request, `gqa_group` the query heads that share a KV head.
    """
    held = largest_batch() // QueryBlocks.of(query_tokens, gqa_group).blocks
    if requests > held:
        logger.warning(
            "deft: DEFT_MAX_BATCH asks for batches of up to %d requests, but the device planner "
            "holds %d; the host's kernel decodes larger batches", requests, held,
        )  # fmt: skip
    return min(requests, held)

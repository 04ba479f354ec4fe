"""Which planner makes a server's plans: the host planner or the device planner."""

import logging
from typing import NamedTuple

import torch

from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import DEFT_FLATTEN
from deft_backend.shapes import QueryBlocks

logger = logging.getLogger("deft_backend")

HOPPER = (9, 0)
"""The compute capability for which ``DEFT_PLANNER=auto`` selects the device planner: the Gluon
kernels also decode the batches that share nothing."""


class Adapter(NamedTuple):
    """The abilities of an adapter that decide which planner makes its plans."""

    waits: bool  # for the GPU before a step; only then can the host planner plan for it
    verifies_device_plans: bool  # whether ``DEFT_VERIFY`` checks steps with device plans
    plans_drafts_on_device: bool  # whether only the device planner plans verifications of drafts


SGLANG_ADAPTER = Adapter(waits=True, verifies_device_plans=False, plans_drafts_on_device=True)
VLLM_ADAPTER = Adapter(waits=False, verifies_device_plans=True, plans_drafts_on_device=False)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """A GPU's compute capability; None for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def untried(
    settings: Settings, capability: tuple[int, int] | None, query_tokens: int
) -> str | None:
    """Why verifications over the policy's device plans need ``DEFT_PLANNER=device``, or None.

    `query_tokens` is the most of a request: 1 in a server that verifies no drafts.
    """
    if query_tokens == 1 or capability is None:
        return None
    if settings.policy != DEFT_FLATTEN or settings.planner == "device":
        return None
    return (
        f"no server on a GPU has verified drafts with DEFT_POLICY={DEFT_FLATTEN} yet; "
        "DEFT_PLANNER=device tries it"
    )


def selects_device_planner(
    settings: Settings, adapter: Adapter, capability: tuple[int, int] | None,
    *, verifies: bool = False,
) -> bool:  # fmt: skip
    """Whether the device planner makes the plans. Both adapters and `deft warm` ask here.

    If ``DEFT_PLANNER`` asks for a planner that cannot be used, the log gives the reason.

    - `capability`: of the GPU that decodes; None for the CPU.
    - `verifies`: whether the server verifies drafts.
    """
    if verifies and adapter.plans_drafts_on_device:  # no other planner can make these plans
        if settings.planner == "host" or settings.verify:
            logger.warning(
                "deft: verification is planned on the device; DEFT_PLANNER=host and DEFT_VERIFY "
                "have no effect in a server that speculates"
            )
        return True
    host_plans = adapter.waits or capability is None
    if settings.verify and not adapter.verifies_device_plans:
        if settings.planner == "device":
            logger.warning(
                "deft: DEFT_VERIFY checks plans of the host planner only; the host planner makes "
                "the plans"
            )
        return False
    if settings.planner == "host" and not host_plans:
        logger.warning(
            "deft: DEFT_PLANNER=host needs a host that waits for the GPU, and vLLM does not; the "
            "device planner makes the plans"
        )
    if settings.planner == "host":
        return not host_plans
    if settings.planner == "device" or not adapter.waits:
        return True
    # The device planner needs over a millisecond for such a plan, in every step.
    return capability == HOPPER and settings.policy != DEFT_FLATTEN


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

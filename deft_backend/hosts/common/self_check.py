"""A server without a recorded result for its GPU, Triton and torch checks its kernels at start."""

import logging
import time

import torch

from deft_backend.attention import TreeAttention
from deft_backend.attention.self_check import Case, first_failure, unrecorded
from deft_backend.hosts.common.kernel_cache import ranks_cache
from deft_backend.hosts.common.limits import refuse_if
from deft_backend.hosts.common.warm_up import StepTensors, warm_up_attention
from deft_backend.settings.config import Settings

logger = logging.getLogger("deft_backend")

SECONDS = 2.0


def prepare_kernels(attention: TreeAttention, tensors: StepTensors, settings: Settings) -> None:
    """Compile every kernel of a server into the cache of its ranks, run and check each.

    Raises Unsupported if this machine has no recorded results and the check failed.
    """
    with ranks_cache(settings, attention.device) as shared:
        warm_up_attention(attention, tensors, smallest=settings.min_batch, shared=shared)
        refuse_if(failed_self_check(attention, tensors))


def failed_self_check(attention: TreeAttention, tensors: StepTensors) -> str | None:
    """Why the kernels must not decode on this machine, for the log; None if they may.

    Call it after the warm-up, which compiles the kernels, and before the host captures graphs. The
    plan of `attention` is another one afterwards.
    """
    gpu = gpu_name(attention.device)
    unknown = None if gpu is None else unrecorded(gpu)
    if unknown is None:
        return None
    began = time.perf_counter()
    failed = first_failure(attention, _cases(tensors), tensors, SECONDS)
    if failed is not None:
        return (
            f"{unknown} has no recorded results, and the check of its kernels failed "
            f"({failed.case}: {failed.failure}). Run `deft doctor --check` and report its table"
        )
    logger.info(
        "deft: %s has no recorded results; its kernels passed a check of %.1f s",
        unknown, time.perf_counter() - began,
    )  # fmt: skip
    return None


def gpu_name(device: torch.device) -> str | None:
    """A GPU's name; None for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _cases(tensors: StepTensors) -> list[Case]:
    """A case for each kind of the server's steps and layers."""
    drafts = tensors.drafts
    steps: list[tuple[int, bool, bool]] = []  # query tokens, and whether trees and ragged
    if drafts is None or not drafts.always:
        steps.append((1, False, False))
    if drafts is not None:
        steps.append((drafts.query_tokens, drafts.trees, drafts.ragged))
    return [Case(True, *step, *kind) for kind in tensors.layers for step in steps]

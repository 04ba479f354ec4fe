"""What every adapter decides without its host; no import here loads torch."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import AUTO, INVARIANT

logger = logging.getLogger("deft_backend")

Name = TypeVar("Name")
Layer = TypeVar("Layer")

HOPPER = (9, 0)  # the compute capability of H100 and H200


class LayerShape(NamedTuple):
    """Heads of a layer's attention on this rank."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def gqa_group(self) -> int:
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True)
class Division(Generic[Name, Layer]):
    """Which of a model's layers run through tree attention, and why the host runs the others."""

    # The layers that run through tree attention, each with what the adapter knows of it.
    tree: Mapping[Name, Layer]
    host: Mapping[Name, str]  # for each other layer, the reason why the host's kernel runs it

    def text(self) -> str | None:
        """The division in one line, or None if tree attention runs every layer."""
        if not self.host:
            return None
        reasons = Counter(self.host.values()).most_common()
        parts = [f"{count} with {reason}" for reason, count in reasons]
        return (
            f"{len(self.tree)} of {len(self.tree) + len(self.host)} layers decode through tree "
            f"attention; {', '.join(parts)} through the host's kernels"
        )


class Unsupported(RuntimeError):
    """Why the host runs the attention, in one line; without a message if the log has the reason."""


def refuse_if(reason: str | None) -> None:
    if reason is not None:
        raise Unsupported(reason)


def refused(requests: int, settings: Settings, planned: int) -> str | None:
    """Why the host decodes a batch or graph of this size, or None; plans hold `planned` of them."""
    if requests > settings.max_batch:
        return f"batch larger than DEFT_MAX_BATCH={settings.max_batch}"
    if requests > planned:
        return f"batch larger than the {planned} requests that a plan holds"
    if requests < settings.min_batch:
        return f"batch smaller than DEFT_MIN_BATCH={settings.min_batch}"
    return None


def other_policy(settings: Settings, mode: str) -> str | None:
    """Why the settings rule out a host's mode whose results must not depend on the batch."""
    if settings.policy in (AUTO, INVARIANT):
        return None
    return f"{mode} takes policy {INVARIANT}, and DEFT_POLICY is {settings.policy}: unset it"


def for_any_batch(settings: Settings, *, equal_bits: bool) -> Settings:
    """The settings; policy `invariant` has no smallest batch: the host's bits differ."""
    if equal_bits:
        settings = replace(settings, policy=INVARIANT)
    return replace(settings, min_batch=1) if settings.policy == INVARIANT else settings


def planned_on_device(requests: int, query_tokens: int, gqa_group: int = 1) -> int:
    """The largest batch that the device planner plans; the log says if a server's is larger."""
    from deft_backend.planner.on_device import largest_batch
    from deft_backend.shapes import QueryBlocks

    held = largest_batch() // QueryBlocks.of(query_tokens, gqa_group).blocks
    if requests > held:
        logger.warning(
            "deft: DEFT_MAX_BATCH asks for batches of up to %d requests, but the device planner "
            "holds %d; the host's kernel decodes larger batches",
            requests,
            held,
        )
    return min(requests, held)


def same_on_all_ranks(group: Any, mine: Sequence[object] | None) -> bool | None:
    """Whether decisions have equal ``repr`` on every rank; None if some rank has no tree attention.
    All ranks of the group must call this; it communicates through CPU memory.
    """
    if group is None or group.world_size == 1:
        return None if mine is None else True
    import torch
    import torch.distributed

    digest = zlib.crc32(repr(mine).encode())
    # The least digest, and the largest one with its sign changed, in one exchange.
    flags = torch.tensor([int(mine is not None), digest, -digest], dtype=torch.int64)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    everywhere, least, most = flags.tolist()
    return least == -most if everywhere else None

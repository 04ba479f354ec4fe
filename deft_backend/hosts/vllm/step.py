"""One decode step of one KV-cache group: planned by its first layer, read by the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deft_backend.hosts.vllm.group import GroupAttention
from deft_backend.hosts.vllm.layers import Layer

_ATTRIBUTE = "deft_step"


class TreeStep:
    """The data of a decode step that the host's metadata lacks; attached to that metadata.

    The first layer that runs makes the plan, not the builder. So a captured graph holds the
    planning and repeats it at every replay. The host may run the same metadata again: it warms up
    before it captures. A layer that runs a second time therefore begins a new pass, with a new
    plan.

    Parameters
    ----------
    group : GroupAttention
        Tree attention of the group's layers.
    page_table : [B, P] int32
        The host's own tensor on the device, which it fills again in each step.
    seq_lens : [B] int32
        The host's own tensor on the device; 0 for padding requests.
    """

    def __init__(
        self, group: GroupAttention, page_table: torch.Tensor, seq_lens: torch.Tensor
    ) -> None:
        self.group = group
        self.page_table = page_table
        self.seq_lens = seq_lens
        self._seen: set[int] = set()

    def takes(self, layer: Layer) -> bool:
        """Whether a layer of the step goes through tree attention."""
        return not self._unplanned and self.group.takes(layer)

    _unplanned = False
    """Whether the planning has failed, so that the host's implementation runs all layers."""

    def leave(self, reason: str) -> None:
        """Log why layers of the step run in the host's implementation."""
        self.group.leave(reason)

    def attend(
        self,
        owner: object,
        layer: Layer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        host: Callable[[], torch.Tensor],
        sinks: torch.Tensor | None = None,
    ) -> bool:
        """Decode a layer into `output`; False if the host's implementation must.

        Parameters
        ----------
        owner
            The layer's implementation; it identifies the layer within a pass.
        layer : Layer
        query : [T, Hq, D]
            One token for each request at the first B indices; padding follows.
        kv_cache : [pages, Hkv, page_size, 2 * D]
        output : [T, Hq, D]
        host : callable
            Runs the host's own implementation into the same `output`; ``DEFT_VERIFY`` compares the
            two.
        sinks : [Hq], optional
            A logit for each query head.
        """
        group = self.group
        try:
            if not self._seen or id(owner) in self._seen:
                self._seen.clear()
                group.plan(self.page_table, self.seq_lens)
            self._seen.add(id(owner))
            group.run(layer, query, kv_cache, self.page_table, self.seq_lens, output, sinks)
            if group.verifies:
                group.verify(output[: len(self.seq_lens)], host)
            return True
        except Exception as error:
            if self._seen:
                group.give_up(error)
            else:
                self._unplanned = True
                group.leave_unplanned(error, self.seq_lens)
            return False


def attach(metadata: Any, step: TreeStep | None) -> None:
    """Attach a step to the host's metadata; None detaches the step of a copied metadata."""
    setattr(metadata, _ATTRIBUTE, step)


def step_of(metadata: Any) -> TreeStep | None:
    """The step attached to a metadata; None if the host's implementation runs."""
    step: TreeStep | None = getattr(metadata, _ATTRIBUTE, None)
    return step

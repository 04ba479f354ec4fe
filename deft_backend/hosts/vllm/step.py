"""One decode step of one KV-cache group: planned by its first layer, read by the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deft_backend.hosts.vllm.group import GroupAttention
from deft_backend.hosts.vllm.layers import Layer

_ATTRIBUTE = "deft_step"


class TreeStep:
    """What a decode step needs beside the host's metadata, to which it is attached.

    The plan is made by the first layer that runs, not by the builder: within a captured graph,
    and so at every replay. The host may run the same metadata again (it warms up before it
    captures), so a layer that runs a second time begins a new pass, with a new plan.

    Parameters
    ----------
    group : GroupAttention
        Tree attention of the group's layers.
    page_table : [B, P] int32
        On the device; the host's own tensor, which it fills anew each step.
    seq_lens : [B] int32
        On the device, likewise; 0 in rows that no request owns.
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
        return self.group.takes(layer)

    def leave(self, reason: str) -> None:
        """Say that layers of the step run in the host's implementation, as only they could know."""
        self.group.leave(reason)

    def attend(
        self,
        owner: object,
        layer: Layer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        host: Callable[[], torch.Tensor],
    ) -> bool:
        """Decode a layer into `output`; False if the host's implementation must.

        Parameters
        ----------
        owner
            The layer's implementation, by which passes are told apart.
        layer : Layer
        query : [T, Hq, D]
            A token a request in the first B rows; what follows is padding.
        kv_cache : [pages, Hkv, page_size, 2 * D]
        output : [T, Hq, D]
        host : callable
            The host's own implementation into the same `output`, to be compared with under
            ``DEFT_VERIFY``.
        """
        group = self.group
        try:
            if not self._seen or id(owner) in self._seen:
                self._seen.clear()
                group.plan(self.page_table, self.seq_lens)
            self._seen.add(id(owner))
            group.run(layer, query, kv_cache, self.page_table, self.seq_lens, output)
            if group.verifies:
                group.verify(output[: len(self.seq_lens)], host)
            return True
        except Exception as error:
            group.give_up(error)
            return False


def attach(metadata: Any, step: TreeStep | None) -> None:
    """Attach a step to the host's metadata, or detach what a copied metadata brought along."""
    setattr(metadata, _ATTRIBUTE, step)


def step_of(metadata: Any) -> TreeStep | None:
    """The step attached to a metadata; None where the host's implementation runs."""
    step: TreeStep | None = getattr(metadata, _ATTRIBUTE, None)
    return step

"""One step of one KV-cache group, a decode or a verification: planned by its first layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deft_backend.hosts.vllm.start.layers import Layer
from deft_backend.hosts.vllm.step.group import GroupAttention

_ATTRIBUTE = "deft_step"


class TreeStep:
    """The data of a step that the host's metadata lacks; attached to that metadata.

    In decode each request has one query token. In verification it has up to `query_tokens`: one
    that follows the verified ones, and a chain of draft tokens.

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
        The host's own tensor on the device, with the query tokens; 0 for padding requests.
    tokens : int
        Rows of the batch's queries.
    query_tokens : int
        Most query tokens of a request.
    query_start : [B + 1] int32, optional
        In verification, the host's own tensor on the device: the first row of each request.
    """

    def __init__(
        self, group: GroupAttention, page_table: torch.Tensor, seq_lens: torch.Tensor, *,
        tokens: int, query_tokens: int = 1, query_start: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.group = group
        self.page_table = page_table
        self.seq_lens = seq_lens
        self.tokens = tokens
        self.query_tokens = query_tokens
        self.query_start = query_start
        self._seen: set[int] = set()
        self._unplanned = False  # planning has failed: the host's implementation runs all layers

    def with_page_table(self, group: GroupAttention, page_table: torch.Tensor) -> TreeStep:
        """The same requests in another group's page table [rows, P]."""
        return TreeStep(
            group, page_table[: len(self.seq_lens)], self.seq_lens, tokens=self.tokens,
            query_tokens=self.query_tokens, query_start=self.query_start,
        )  # fmt: skip

    def takes(self, layer: Layer) -> bool:
        """Whether a layer of the step goes through tree attention."""
        return not self._unplanned and self.group.takes(layer)

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
        """Compute a layer into `output`; False if the host's implementation must.

        Parameters
        ----------
        owner
            The layer's implementation; it identifies the layer within a pass.
        layer : Layer
        query : [T, Hq, D]
            The batch's query tokens at the first `tokens` indices; padding follows.
        kv_cache : [pages, Hkv, page_size, 2 * D]
        output : [T, Hq, D]
        host : callable
            Runs the host's own implementation into the same `output`; ``DEFT_VERIFY`` compares the
            two.
        sinks : [Hq], optional
            The sink of each query head.
        """
        group = self.group
        try:
            if not self._seen or id(owner) in self._seen:
                self._seen.clear()
                group.plan(self.page_table, self.seq_lens, self.query_tokens)
            self._seen.add(id(owner))
            rows = output[: self.tokens]
            group.run(
                layer, query[: self.tokens], kv_cache, self.page_table, self.seq_lens, rows,
                self.query_start, sinks,
            )  # fmt: skip
            if group.verifies:
                group.verify(rows, host)
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


def is_attached(metadata: Any) -> bool:
    """Whether our builder has made the metadata, with a step or without."""
    return hasattr(metadata, _ATTRIBUTE)


def step_of(metadata: Any) -> TreeStep | None:
    """The step attached to a metadata; None if the host's implementation runs."""
    step: TreeStep | None = getattr(metadata, _ATTRIBUTE, None)
    return step

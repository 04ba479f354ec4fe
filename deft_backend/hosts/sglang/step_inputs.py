"""The two kinds of step that tree attention runs: decode, and the verification of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deft_backend.attention import PlannedAttention
from deft_backend.forest.token_tree import ancestors_of_links
from deft_backend.hosts.sglang.versions import draft_links


@dataclass(frozen=True)
class StepInputs:
    seq_lens: torch.Tensor  # [B]; tokens of each request, the step's included
    table_rows: torch.Tensor  # [B]; each request's row of the page table
    query_tokens: int = 1  # of each request
    # [B, n, W] int64; of the query tokens of token trees; None for chains and for decode.
    ancestors: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.seq_lens.shape[0] * self.query_tokens

    def plan(self, attention: PlannedAttention, page_table: torch.Tensor) -> None:
        attention.plan_batch(
            page_table, self.seq_lens, table_rows=self.table_rows, query_tokens=self.query_tokens
        )


class Decode:
    """One query token a request; the host's batch holds everything."""

    query_tokens = 1

    def unsuitable(self, forward_batch: Any, *, captured: bool = False) -> str | None:
        return None

    def load(self, spec_info: Any) -> None:
        """Copy into fixed memory what a graph reads and the host does not keep in place."""

    def inputs(self, forward_batch: Any) -> StepInputs:
        return StepInputs(forward_batch.seq_lens, forward_batch.req_pool_indices)


class Verification:
    """The last accepted token and the draft tokens of each request: a chain or a token tree. A
    replay loads the links of its batch, and the graph computes lengths and ancestors from them on
    the device.
    """

    def __init__(self, query_tokens: int, largest: int, device: torch.device) -> None:
        self.query_tokens = query_tokens
        shape = (2, largest, query_tokens)
        self._links = torch.full(shape, -1, dtype=torch.int64, device=device)

    def unsuitable(self, forward_batch: Any, *, captured: bool = False) -> str | None:
        spec = forward_batch.spec_info
        tokens = getattr(spec, "draft_token_num", None)
        if tokens != self.query_tokens:
            return f"verification of {tokens} tokens, not {self.query_tokens}"
        # Without links, a mask may let a block's tokens see each other in both directions.
        linked = hasattr(spec, "retrieve_next_token")
        plain = linked or (is_chain(spec) and getattr(spec, "custom_mask", None) is None)
        if not plain or getattr(spec, "ragged_verify_layout", None) is not None:
            return "verification of neither chains nor token trees"
        if captured or is_chain(spec):
            return None
        links = draft_links(spec)
        expected = forward_batch.batch_size * self.query_tokens
        if links is None or any(part.numel() != expected for part in links):
            return "no links between the draft tokens of each request"
        return None

    def load(self, spec_info: Any) -> None:
        """Copy the links of a batch of trees; raises RuntimeError if the host has none."""
        if spec_info is None or is_chain(spec_info):
            return
        links = draft_links(spec_info)
        if links is None:
            raise RuntimeError("the host gives no links between its draft tokens")
        for held, part in zip(self._links, links, strict=True):
            held[: part.numel() // self.query_tokens].copy_(part.view(-1, self.query_tokens))

    def inputs(self, forward_batch: Any) -> StepInputs:
        ancestors = None
        if not is_chain(forward_batch.spec_info):
            ancestors = ancestors_of_links(*self._links[:, : forward_batch.batch_size])
        return StepInputs(
            forward_batch.seq_lens + self.query_tokens,
            forward_batch.req_pool_indices,
            self.query_tokens,
            ancestors,
        )


StepKind = Decode | Verification
DECODE = Decode()


def is_chain(spec_info: Any) -> bool:
    return bool(getattr(spec_info, "topk", None) == 1)

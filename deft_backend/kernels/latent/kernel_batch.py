"""What the host's MLA kernel is called with: a batch of variable length, one entry an item."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from deft_backend.planner.device_plan import Pointer


class KernelBatch(NamedTuple):
    """The batch of a call, as the host's kernel takes it. Entries behind the last are empty."""

    query_start: Pointer  # [N + 1] int32: each entry's first query token in the tensors of queries
    table_rows: Pointer  # [N] int32: the row of the page table that holds the entry's KV
    # [N] int32: first token of the entry's KV range in that row, and the one after its last.
    begin: Pointer
    end: Pointer


class LatentCall(NamedTuple):
    """One call of the host's kernel."""

    q_nope: torch.Tensor  # [T, H, value_dim]
    q_rope: torch.Tensor  # [T, H, rope_dim]
    cache: torch.Tensor  # [pages, page_size, 1, value_dim + rope_dim]
    page_table: torch.Tensor  # [rows, P] int32
    batch: KernelBatch
    max_query_tokens: int  # most query tokens of an entry
    sm_scale: float
    # Whether an entry's query tokens are the last of its KV range, and see none after themselves.
    causal: bool
    most_splits: int  # most parts into which the kernel may split a KV range


class LatentKernel(Protocol):
    """The host's kernel for multi-head latent attention."""

    def __call__(self, call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention [T, H, value_dim], and its log-sum-exps [H, T] float32, in base e."""
        ...

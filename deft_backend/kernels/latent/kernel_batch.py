"""What the host's MLA kernel is called with: a batch of variable length, one entry an item."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from deft_backend.planner.device_plan import Pointer


class KernelBatch(NamedTuple):
    """The batch of a call, as the host's kernel takes it. Entries behind the last are empty.

    Attributes
    ----------
    query_start : [N + 1] int32
        First query token of each entry in the tensors of queries.
    table_rows : [N] int32
        The row of the page table that holds the entry's KV.
    begin, end : [N] int32
        First token of the entry's KV range in that row, and the one after its last.
    """

    query_start: Pointer
    table_rows: Pointer
    begin: Pointer
    end: Pointer


class LatentCall(NamedTuple):
    """One call of the host's kernel.

    Attributes
    ----------
    q_nope : [T, H, value_dim]
    q_rope : [T, H, rope_dim]
    cache : [pages, page_size, 1, value_dim + rope_dim]
    page_table : [rows, P] int32
    batch : KernelBatch
    max_query_tokens : int
        Most query tokens of an entry.
    sm_scale : float
    causal : bool
        Whether an entry's query tokens are the last of its KV range, and see none after themselves.
    most_splits : int
        Most parts into which the kernel may split a KV range.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    cache: torch.Tensor
    page_table: torch.Tensor
    batch: KernelBatch
    max_query_tokens: int
    sm_scale: float
    causal: bool
    most_splits: int


class LatentKernel(Protocol):
    """The host's kernel for multi-head latent attention."""

    def __call__(self, call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention [T, H, value_dim], and its log-sum-exps [H, T] float32, in base e."""
        ...

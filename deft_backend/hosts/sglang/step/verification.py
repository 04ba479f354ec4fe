"""Verification of drafts: what a step needs besides the host's batch."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.forest.token_tree import ancestors_of_links
from deft_backend.hosts.sglang.versions import draft_links


class Verification:
    """The query tokens of the current verification: their lengths and, for trees, their ancestors.

    The host's lengths exclude the draft tokens. Its masks have layouts that depend on its backend.
    The links between draft tokens have one layout, so ancestors come from the links. A replay loads
    the links of its batch, and the graph computes lengths and ancestors from them on the device.

    Parameters
    ----------
    query_tokens : int
        Query tokens of each request.
    largest : int
        Requests of the largest batch.
    device : torch.device
    """

    def __init__(self, query_tokens: int, largest: int, device: torch.device) -> None:
        self.query_tokens = query_tokens
        self.seq_lens: torch.Tensor | None = None
        """[B]: tokens of each request with its query tokens, once prepared."""
        self.ancestors: torch.Tensor | None = None
        """[B, n, W] int64, once prepared for trees; None for chains."""
        shape = (2, largest, query_tokens)
        self._links = torch.full(shape, -1, dtype=torch.int64, device=device)

    def unsuitable(self, forward_batch: Any, *, captured: bool) -> str | None:
        """Why a verification is not one that tree attention computes, or None.

        The batch of a capture has no links yet.
        """
        spec = forward_batch.spec_info
        tokens = getattr(spec, "draft_token_num", None)
        if tokens != self.query_tokens:
            return f"verification of {tokens} tokens, not {self.query_tokens}"
        if captured or is_chain(spec):
            return None
        links = draft_links(spec)
        expected = forward_batch.batch_size * self.query_tokens
        if links is None or any(part.numel() != expected for part in links):
            return "no links between the draft tokens of each request"
        return None

    def load(self, spec_info: Any) -> None:
        """Copy the links of a batch of trees; chains need none.

        During a capture the host has none yet.

        Raises
        ------
        RuntimeError
            If the host has no links for its trees. A graph would then verify other trees.
        """
        if is_chain(spec_info):
            return
        links = draft_links(spec_info)
        if links is None:
            raise RuntimeError("the host gives no links between its draft tokens")
        for held, part in zip(self._links, links, strict=True):
            held[: part.numel() // self.query_tokens].copy_(part.view(-1, self.query_tokens))

    def prepare(self, forward_batch: Any) -> None:
        """Launch what the step's attention reads; a graph records it."""
        requests = forward_batch.batch_size
        self.seq_lens = forward_batch.seq_lens + self.query_tokens
        self.ancestors = None
        if not is_chain(forward_batch.spec_info):
            self.ancestors = ancestors_of_links(*self._links[:, :requests])


def is_chain(spec_info: Any) -> bool:
    """Whether each draft token follows the one before it: EAGLE's ``topk`` of 1."""
    return bool(getattr(spec_info, "topk", None) == 1)

"""The draft extension: the draft model's pass over the tokens of a verification."""

from __future__ import annotations

import logging
from typing import Any

import torch

from deft_backend.hosts.sglang.drafts.draft_steps import same_pass
from deft_backend.hosts.sglang.step.device_planned import DevicePlannedBackend
from deft_backend.hosts.sglang.step.verification import Verification

logger = logging.getLogger("deft_backend")


class ExtensionTokens(Verification):
    """The query tokens of a draft extension: a chain, as long as a verification.

    The host's lengths include the query tokens. Padding requests are shorter than their query
    tokens.
    """

    def __init__(self, query_tokens: int) -> None:
        self.query_tokens = query_tokens
        self.seq_lens: torch.Tensor | None = None
        self.ancestors = None

    def unsuitable(self, forward_batch: Any, *, captured: bool) -> str | None:
        tokens = getattr(forward_batch.spec_info, "num_tokens_per_req", None)
        if tokens != self.query_tokens:
            return f"a draft extension of {tokens} tokens, not {self.query_tokens}"
        return None

    def load(self, spec_info: Any) -> None:
        """Chains have no links."""

    def prepare(self, forward_batch: Any) -> None:
        self.seq_lens = forward_batch.seq_lens.clamp(min=self.query_tokens)


class DraftExtension(DevicePlannedBackend):
    """Around the host's backend for the draft model's prefill and its passes after verification."""

    _own = DevicePlannedBackend._own | {"_told"}
    _told = False

    def _context(self, forward_batch: Any) -> tuple[Any, Any]:
        if not self._told:
            self._told = True
            logger.debug("deft: a draft extension runs through tree attention")
        return super()._context(forward_batch)

    def _is_step(self, mode: Any) -> bool:
        return bool(mode.is_draft_extend_v2())

    def _planned_for(self, forward_batch: Any) -> bool:
        return same_pass(forward_batch, self._tree_batch)

    def _begin_tree_step(self, forward_batch: Any) -> None:
        """The host changes the batch before its forward, so its metadata cannot be made later."""
        super()._begin_tree_step(forward_batch)
        if not self._host_ready:
            self._host.init_forward_metadata(forward_batch)
            self._host_ready = True

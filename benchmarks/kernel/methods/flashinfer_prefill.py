"""FlashInfer's paged prefill: requests of several query tokens, causal or with a custom mask."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Prepared, Refused
from benchmarks.kernel.methods.flashinfer_package import (
    FlashInferMethod,
    flashinfer,
    float_workspace,
    pages_of_requests,
    plan,
    prepared_run,
)

MOST_MASK = 1 << 30
"""Most elements of a custom mask: it has one for each query token and token of its request."""


class FlashInferPrefill(FlashInferMethod):
    """``BatchPrefillWithPagedKVCacheWrapper``, planned for exactly this batch.

    A chain is its causal mask. A token tree is its custom mask, which the wrapper keeps in bits.
    Custom masks need the backend ``fa2``; the peer ``fa3`` shows FlashAttention-3 for chains.
    """

    name = "flashinfer-prefill"
    wrapper = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(self) -> None:
        self._wrapper: Any = None

    def prepare(self, inputs: Inputs) -> Prepared:
        tokens = inputs.query_tokens
        tree = inputs.ancestors is not None
        if tree and tokens * int(inputs.tables.seq_lens.sum()) > MOST_MASK:
            raise Refused(f"the custom mask has more than {MOST_MASK} elements")
        if self._wrapper is None:
            self._wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(
                float_workspace(inputs.device), "NHD", backend="fa2"
            )
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32) * tokens
        plan(
            self._wrapper,
            *(part.to(inputs.device) for part in (starts, *pages_of_requests(inputs))),
            inputs=inputs,
            custom_mask=self._mask(inputs) if tree else None,
            causal=not tree,
        )
        return prepared_run(self._wrapper, inputs)

    def _mask(self, inputs: Inputs) -> torch.Tensor:
        """[sum of query tokens times tokens] bool: who sees whom, request after request."""
        parts = []
        seen = torch.from_numpy(inputs.seen).to(inputs.device)
        for length in inputs.tables.seq_lens.tolist():
            part = torch.ones(len(seen), length, dtype=torch.bool, device=inputs.device)
            part[:, length - len(seen) :] = seen
            parts.append(part.flatten())
        return torch.cat(parts)

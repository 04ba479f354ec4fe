"""FlashInfer's paged prefill: requests of several query tokens, causal or with a custom mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from benchmarks.kernel.methods.flashinfer_package import (
    flashinfer,
    flashinfer_origin,
    flashinfer_unavailable,
    float_workspace,
)

MOST_MASK = 1 << 30
"""Most elements of a custom mask: it has one for each query token and token of its request."""


class FlashInferPrefill(Method):
    """``BatchPrefillWithPagedKVCacheWrapper``, planned for exactly this batch.

    A chain is its causal mask. A token tree is its custom mask, which the wrapper keeps in bits.
    Custom masks need the backend ``fa2``; the peer ``fa3`` shows FlashAttention-3 for chains.
    """

    name = "flashinfer-prefill"

    def __init__(self) -> None:
        self._wrapper: Any = None

    def unavailable(self, device: torch.device) -> str | None:
        return flashinfer_unavailable(device)

    def prepare(self, inputs: Inputs) -> Prepared:
        tables, tokens = inputs.tables, inputs.query_tokens
        tree = inputs.ancestors is not None
        if tree and tokens * int(tables.seq_lens.sum()) > MOST_MASK:
            raise Refused(f"the custom mask has more than {MOST_MASK} elements")
        if self._wrapper is None:
            self._wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(
                float_workspace(inputs.device), "NHD", backend="fa2"
            )
        used = tables.pages_used
        indptr = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
        own = np.arange(tables.page_table.shape[1]) < used[:, None]
        last = tables.seq_lens - (used - 1) * tables.page_size
        starts = np.arange(inputs.batch + 1, dtype=np.int32) * tokens
        wrapper = self._wrapper
        wrapper.plan(
            torch.from_numpy(starts).to(inputs.device),
            torch.from_numpy(indptr).to(inputs.device),
            torch.from_numpy(tables.page_table[own]).to(inputs.device),
            torch.from_numpy(last.astype(np.int32)).to(inputs.device),
            inputs.case.query_heads,
            inputs.case.kv_heads,
            inputs.head_dim,
            inputs.case.page_size,
            custom_mask=self._mask(inputs) if tree else None,
            causal=not tree,
            q_data_type=inputs.q.dtype,
            kv_data_type=inputs.q.dtype,
        )
        out = torch.empty_like(inputs.q)
        cache = (inputs.k_cache, inputs.v_cache)

        def launch() -> torch.Tensor:
            wrapper.run(inputs.q, cache, out=out)
            return out

        return Prepared(launch)

    def _mask(self, inputs: Inputs) -> torch.Tensor:
        """[sum of query tokens times tokens] bool: who sees whom, request after request."""
        parts = []
        seen = torch.from_numpy(inputs.seen).to(inputs.device)
        for length in inputs.tables.seq_lens.tolist():
            part = torch.ones(len(seen), length, dtype=torch.bool, device=inputs.device)
            part[:, length - len(seen) :] = seen
            parts.append(part.flatten())
        return torch.cat(parts)

    def origin(self) -> str:
        return f"{flashinfer_origin()}, BatchPrefillWithPagedKVCacheWrapper"

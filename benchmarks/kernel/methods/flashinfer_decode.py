"""FlashInfer's paged decode with tensor cores: each request alone with its whole KV."""

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


class FlashInferDecode(Method):
    """``BatchDecodeWithPagedKVCacheWrapper``, planned for exactly this batch."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._wrapper: Any = None

    def unavailable(self, device: torch.device) -> str | None:
        return flashinfer_unavailable(device)

    def prepare(self, inputs: Inputs) -> Prepared:
        tables = inputs.tables
        if inputs.query_tokens > 1:
            raise Refused("it takes one query token of each request")
        if (tables.seq_lens == 0).any():
            raise Refused("FlashInfer's decode takes no request without tokens")
        if self._wrapper is None:
            self._wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
                float_workspace(inputs.device), "NHD", use_tensor_cores=True
            )
        used = tables.pages_used
        indptr = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
        own = np.arange(tables.page_table.shape[1]) < used[:, None]
        last = tables.seq_lens - (used - 1) * tables.page_size
        wrapper = self._wrapper
        wrapper.plan(
            torch.from_numpy(indptr),
            torch.from_numpy(tables.page_table[own]),
            torch.from_numpy(last.astype(np.int32)),
            inputs.case.query_heads,
            inputs.case.kv_heads,
            inputs.head_dim,
            inputs.case.page_size,
            q_data_type=inputs.q.dtype,
            kv_data_type=inputs.q.dtype,
        )
        out = torch.empty_like(inputs.q)
        cache = (inputs.k_cache, inputs.v_cache)

        def launch() -> torch.Tensor:
            wrapper.run(inputs.q, cache, out=out)
            return out

        return Prepared(launch)

    def origin(self) -> str:
        return f"{flashinfer_origin()}, BatchDecodeWithPagedKVCacheWrapper(use_tensor_cores=True)"

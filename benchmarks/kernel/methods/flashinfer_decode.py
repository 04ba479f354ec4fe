"""FlashInfer's paged decode with tensor cores: each request alone with its whole KV."""

from __future__ import annotations

from typing import Any

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


class FlashInferDecode(FlashInferMethod):
    """``BatchDecodeWithPagedKVCacheWrapper``, planned for exactly this batch.

    `backend` is the wrapper's: ``auto``, or ``fa2``, which runs on Ampere and Ada too.
    """

    def __init__(self, name: str = "flashinfer", backend: str = "auto") -> None:
        self.name = name
        self.wrapper = f"BatchDecodeWithPagedKVCacheWrapper({backend})"
        self._backend = backend
        self._wrapper: Any = None

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.query_tokens > 1:
            raise Refused("it takes one query token of each request")
        if (inputs.tables.seq_lens == 0).any():
            raise Refused("FlashInfer's decode takes no request without tokens")
        if self._wrapper is None:
            self._wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
                float_workspace(inputs.device), "NHD", use_tensor_cores=True, backend=self._backend
            )
        plan(self._wrapper, *pages_of_requests(inputs), inputs=inputs)
        return prepared_run(self._wrapper, inputs)

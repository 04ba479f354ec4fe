"""FlashInfer, if it is installed: the parts that its wrappers have in common."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared

_WORKSPACE_BYTES = 512 << 20


class FlashInferMethod(Method):
    """A wrapper of the package, which `wrapper` names."""

    wrapper: str

    def unavailable(self, device: torch.device) -> str | None:
        return flashinfer_unavailable(device)

    def origin(self) -> str:
        return f"{flashinfer_origin()}, {self.wrapper}"


def flashinfer_unavailable(device: torch.device) -> str | None:
    """Why FlashInfer cannot run on `device`, in one line; None if it can."""
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    try:
        flashinfer()
    except Exception as error:  # a broken installation may raise anything
        return f"flashinfer cannot be imported: {error}".splitlines()[0]
    return None


@cache
def flashinfer() -> ModuleType:
    """The package, which is not a dependency."""
    return import_module("flashinfer")


@cache
def float_workspace(device: torch.device) -> torch.Tensor:
    """One workspace for all wrappers, which never run at the same time."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def flashinfer_origin() -> str:
    return f"flashinfer {flashinfer().__version__}"


def pages_of_requests(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(indptr, indices, last_page_len)`` of each request alone with its whole KV, on the CPU."""
    tables = inputs.tables
    used = tables.pages_used
    own = np.arange(tables.page_table.shape[1]) < used[:, None]
    last = tables.seq_lens - (used - 1) * tables.page_size
    return (
        torch.from_numpy(np.concatenate([[0], np.cumsum(used)]).astype(np.int32)),
        torch.from_numpy(tables.page_table[own]),
        torch.from_numpy(last.astype(np.int32)),
    )


def plan(
    wrapper: Any, *where: torch.Tensor | list[torch.Tensor], inputs: Inputs, **options: Any
) -> None:
    """Plan `wrapper` for the inputs' heads, pages and dtype; `where` comes before these."""
    wrapper.plan(
        *where,
        inputs.case.query_heads,
        inputs.case.kv_heads,
        inputs.head_dim,
        inputs.case.page_size,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k_cache.dtype,
        **options,
    )


def prepared_run(wrapper: Any, inputs: Inputs) -> Prepared:
    """Runs of a planned wrapper over the inputs' cache."""
    out = torch.empty_like(inputs.q)
    cache = (inputs.k_cache, inputs.v_cache)

    def launch() -> torch.Tensor:
        wrapper.run(inputs.q, cache, out=out)
        return out

    return Prepared(launch)

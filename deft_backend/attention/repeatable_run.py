"""A run of a planned batch that the later layers of a step repeat."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deft_backend.attention.current_plan import PlannedBatch
from deft_backend.kernels import LayerLaunches


class LayerAddresses(NamedTuple):
    """A layer's tensors that stay the same from step to step, by address.

    They are valid as long as the caller keeps the tensors.
    """

    k: int
    v: int
    sinks: int  # 0 without
    k_scale: int
    v_scale: int
    layout: tuple[Any, ...]  # all but the addresses: shapes, strides, dtypes, and numbers
    aligned: bool  # whether every address is a multiple of 16


def layer_addresses(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
) -> LayerAddresses:
    """For :meth:`TreeAttention.repeat`; the parameters are those of :meth:`TreeAttention.run`."""
    tensors = (k_cache, v_cache, sinks, k_scale, v_scale)
    k, v, of_sinks, of_k_scale, of_v_scale = (
        each.data_ptr() if isinstance(each, torch.Tensor) else 0 for each in tensors
    )
    layout = (sm_scale, logit_cap, *map(_layout, tensors))
    layout = _LAYOUTS.setdefault(layout, layout)
    aligned = (k | v | of_sinks | of_k_scale | of_v_scale) % 16 == 0
    return LayerAddresses(k, v, of_sinks, of_k_scale, of_v_scale, layout, aligned)


_LAYOUTS: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # equal ones are one object


def _layout(value: Any) -> Any:
    """All but the address of a tensor; a number as it is."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


class RepeatableRun:
    """The launches of a run, with what a layer must have in common with the one that it ran.

    - `batch`: of the plan that it followed.
    - `rows`: the batch's rows of queries and output.
    """

    def __init__(
        self,
        batch: PlannedBatch,
        launches: LayerLaunches,
        layer: LayerAddresses,
        q: torch.Tensor,
        out: torch.Tensor,
        rows: int,
    ) -> None:
        self.batch = batch
        self._launches = launches
        self._layer = layer.layout
        self._rows = rows
        self._queries = _rows_of(q)
        self._output = _rows_of(out)
        self._device = q.get_device()

    def run(self, layer: LayerAddresses, q: torch.Tensor, out: torch.Tensor) -> bool:
        """Launch for another layer; False if it differs in more than addresses."""
        if layer.layout is not self._layer or not layer.aligned:
            return False
        if _rows_of(q) != self._queries or _rows_of(out) != self._output:
            return False
        if q.shape[0] < self._rows or out.shape[0] < self._rows:
            return False
        queries, output = q.data_ptr(), out.data_ptr()
        if (queries | output) % 16 or torch.cuda.current_device() != self._device:
            return False
        k, v, sinks, k_scale, v_scale, _, _ = layer
        self._launches.run(queries, k, v, output, sinks, k_scale, v_scale)
        return True


def _rows_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All but the address and the number of rows."""
    _, heads, dim = tensor.shape
    return tensor.stride(), heads, dim, tensor.dtype, tensor.device

"""The launches of a planned step, made by its first layer and repeated by the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from deft_backend.compile.triton_kernel import Runner, addresses_of


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


class LayerLaunches:
    """Launches of both stages over one plan, for layers that differ in seven addresses alone.

    - `tensors`: what the kernels take, as in :class:`~deft_backend.kernels.arguments.Tensors`.
    - `stage1`: for each tile shape a runner, and its arguments behind the tensors.
    - `stage2`: a runner, and its arguments behind the partial results, the output and the sinks;
      None if there is nothing to merge.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        stage1: Sequence[tuple[Runner, tuple[Any, ...]]],
        stage2: tuple[Runner, tuple[Any, ...]] | None,
    ) -> None:
        self._device = tensors[0].get_device()
        self._queries, self._output = _rows_of(tensors[0]), _rows_of(tensors[3])
        self._rows = len(tensors[0])
        addresses = addresses_of(tuple(tensors))
        self._partial = addresses[4]
        self._step = addresses[5:10]  # page table, rows, lengths, query starts, ancestors
        self._stage1 = [(runner, addresses_of(rest)) for runner, rest in stage1]
        self._stage2 = None if stage2 is None else (stage2[0], addresses_of(stage2[1]))
        self._kept = tensors[4:10]  # their addresses stay valid; plans keep theirs

    def run(
        self, layout: tuple[Any, ...], layer: LayerAddresses, q: torch.Tensor, out: torch.Tensor
    ) -> bool:
        """Launch for another layer; False if it differs in more than addresses from the first one,
        whose `layout` is given.
        """
        if layer.layout is not layout or not layer.aligned:
            return False
        if _rows_of(q) != self._queries or _rows_of(out) != self._output:
            return False
        if q.shape[0] < self._rows or out.shape[0] < self._rows:
            return False
        to_q, to_out = q.data_ptr(), out.data_ptr()
        if (to_q | to_out) % 16 or torch.cuda.current_device() != self._device:
            return False
        stream = driver.active.get_current_stream(self._device)
        lse = self._partial[1]  # as in `Step.tensors`, for what the layer lacks
        sinks = layer.sinks or lse
        scales = (layer.k_scale or lse, layer.v_scale or lse)
        tensors = (to_q, layer.k, layer.v, to_out, self._partial, *self._step, sinks, *scales)
        for runner, rest in self._stage1:
            runner(tensors, *rest, stream=stream)
        if self._stage2 is not None:
            runner, rest = self._stage2
            runner(self._partial, to_out, sinks, *rest, stream=stream)
        return True


def _rows_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All but the address and the number of rows."""
    _, heads, dim = tensor.shape
    return tensor.stride(), heads, dim, tensor.dtype, tensor.device

"""The launches of a planned step, made by its first layer and repeated by the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime import driver

Runner = Callable[..., None]
"""Launches a compiled kernel for its grid: ``runner(*arguments, stream=stream)``."""


class LayerLaunches:
    """Launches of both stages over one plan, for layers that differ in seven addresses alone.

    A launch takes an address for each tensor. Triton asks a tensor for its address and the driver
    what it points to, which takes most of a launch's time. Numbers it takes as they are.

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
        addresses = addresses_of(tuple(tensors))
        self._partial = addresses[4]
        self._step = addresses[5:10]  # page table, rows, lengths, query starts, ancestors
        self._stage1 = [(runner, addresses_of(rest)) for runner, rest in stage1]
        self._stage2 = None if stage2 is None else (stage2[0], addresses_of(stage2[1]))
        self._kept = tensors[4:10]  # their addresses stay valid; plans keep theirs

    def run(self, q: int, k: int, v: int, out: int, sinks: int, k_scale: int, v_scale: int) -> None:
        """Launch on the current stream, for a layer at these addresses; 0 for what it lacks."""
        stream = driver.active.get_current_stream(self._device)
        lse = self._partial[1]  # as in `Step.tensors`, for what the layer lacks
        sinks, k_scale, v_scale = sinks or lse, k_scale or lse, v_scale or lse
        tensors = (q, k, v, out, self._partial, *self._step, sinks, k_scale, v_scale)
        for runner, rest in self._stage1:
            runner(tensors, *rest, stream=stream)
        if self._stage2 is not None:
            runner, rest = self._stage2
            runner(self._partial, out, sinks, *rest, stream=stream)


def addresses_of(arguments: Any) -> Any:
    """Arguments of a launch with the address of each tensor in its place."""
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr()
    if isinstance(arguments, tuple):
        return tuple(addresses_of(each) for each in arguments)
    return arguments

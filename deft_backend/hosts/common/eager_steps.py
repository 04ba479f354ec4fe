"""Steps that Python launches layer by layer, without a CUDA graph: they wait for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deft_backend.attention import LayerAddresses, TreeAttention
from deft_backend.hosts.common.latches import OnceLog

Size = tuple[int, int]
"""Of a step: the bits of its number of query tokens, and the most of a request."""


def size_of(rows: int, query_tokens: int) -> Size:
    return rows.bit_length(), query_tokens


class Repeats:
    """Layers that repeat the launches of the layer before.

    The first repeat of each size of step is a trial: a full run follows it, and the two must have
    the same bits. A difference ends all repeats.
    """

    def __init__(self, attention: TreeAttention, log: OnceLog, *, verify: bool) -> None:
        self._attention = attention
        self._log = log
        self.on = attention.device.type == "cuda" and not verify
        self._proven: set[Size] = set()  # of steps whose trial has passed

    def repeat(self, layer: LayerAddresses, q: torch.Tensor, out: torch.Tensor, size: Size) -> bool:
        """Compute a layer of the step whose last layer has run; False if it needs :meth:`run`."""
        return size in self._proven and self._attention.repeat(layer, q, out)

    def run(
        self,
        full: Callable[[], object],
        layer: LayerAddresses,
        q: torch.Tensor,
        out: torch.Tensor,
        size: Size,
    ) -> None:
        """Make a layer's `full` run into `out`, after a trial if its size has had none."""
        trial = None
        if self.on and size not in self._proven and not capturing(out):
            trial = out.clone()
            trial = trial if self._attention.repeat(layer, q, trial) else None
        full()
        if trial is None:
            return
        bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
        if torch.equal(trial.view(bits), out.view(bits)):  # waits for the device
            self._proven.add(size)
            return
        self.on = False
        self._proven.clear()
        self._log.warn(
            "a repeated launch differs from a full run; every layer of eager steps makes its own "
            "launches from now on, which takes CPU time"
        )


def capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

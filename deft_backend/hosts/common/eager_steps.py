"""Steps that Python launches layer by layer, without a CUDA graph: they wait for the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deft_backend.attention import LayerAddresses, TreeAttention
from deft_backend.costs.cost_model import CostModel
from deft_backend.hosts.common.latches import OnceLog
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import INVARIANT

PLAN_MS, LAYER_MS = 0.7, 0.12
"""Estimates of what tree attention adds to such a step on the CPU: the launches of its plan, and in
a step that also prefills a second attention in each layer (docs/kernel-log.md)."""

PREFILLS = "a step with prefills whose other requests share too little"
DECODES = "an eager step whose requests share too little"


def has_one_way(settings: Settings) -> bool:
    """Whether tree attention decodes all it can: for equal bits, or to be verified."""
    return settings.policy == INVARIANT or settings.verify


def shares_too_little(
    saved_bytes: int, layers: int, costs: CostModel | None, *, prefills: bool
) -> str | None:
    """Why the host's kernel decodes an eager step, or None.

    - `saved_bytes`: what tree attention reads less in each of its `layers`.
    - `costs`: of the GPU; None on the CPU, where any saving pays for a split, and a step that
      decodes alone has only one way.
    - `prefills`: whether the step also prefills.
    """
    if costs is None:
        return PREFILLS if prefills and not saved_bytes else None
    added = PLAN_MS + (LAYER_MS * layers if prefills else 0.0)
    if costs.transfer_ms(saved_bytes) * layers > added:
        return None
    return PREFILLS if prefills else DECODES


Size = tuple[int, int]
"""Of a step: the bits of its number of query tokens, and the most of a request."""


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

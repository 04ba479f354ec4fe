"""The role that every measured kernel takes: prepare once for a batch, then launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.kernel.case_inputs import Inputs


class Refused(RuntimeError):
    """A case that a method cannot represent; the message is the reason, in a line."""


@dataclass(frozen=True)
class Prepared:
    """A planned batch.

    Attributes
    ----------
    launch : callable
        Enqueues the attention on the current stream and returns its output, [B, Hq, D]. It does
        no planning and no synchronisation, so it can be captured into a CUDA graph.
    rows : [B] int64, optional
        Batch row of each row of the output; None where they are in batch order.
    poison : callable, optional
        Fills the method's own workspace with NaN.
    facts : mapping
        What is worth recording of the plan.
    """

    launch: Callable[[], torch.Tensor]
    rows: torch.Tensor | None = None
    poison: Callable[[], None] | None = None
    facts: Mapping[str, int] = field(default_factory=dict)


class Method(ABC):
    """A way to compute decode attention over a paged KV cache."""

    name: str

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why the method cannot run here at all, in a line; None if it can."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Prepared:
        """Plan a batch, outside the clock.

        Raises
        ------
        Refused
            If the method cannot represent the case.
        """

    def origin(self) -> str:
        """Which build of which package it is, for the header."""
        return self.name

"""The interface of every measured kernel: prepare once for a batch, then launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.kernel.case_inputs import Inputs


class Refused(RuntimeError):
    """A case that a method cannot represent; the message is the reason, in one line."""


@dataclass(frozen=True)
class Prepared:
    """A planned batch.

    - `launch`: enqueues the attention on the current stream and returns its output, [B, Hq, D]. It
      neither plans nor synchronises, so a CUDA graph can capture it.
    - `rows`: [B] int64. Request index of each row of the output; None if the output is in batch
      order.
    - `poison`: fills the method's own workspace with NaN.
    - `plan`: plans the batch again on the device, as a server's CUDA graph does in every step.
    - `facts`: facts about the plan for the row.
    - `tolerance`: relative error above which the result is wrong, if the method rounds more than
      the dtype of the queries does.
    """

    launch: Callable[[], torch.Tensor]
    rows: torch.Tensor | None = None
    poison: Callable[[], None] | None = None
    plan: Callable[[], torch.Tensor] | None = None
    facts: Mapping[str, int] = field(default_factory=dict)
    tolerance: float | None = None


class Method(ABC):
    """A way to compute decode attention over a paged KV cache."""

    name: str

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why the method cannot run on this machine, in one line; None if it can."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Prepared:
        """Plan a batch; the time is not counted.

        Raises Refused if the method cannot represent the case.
        """

    def origin(self) -> str:
        """The package and build of the method, for the header."""
        return self.name

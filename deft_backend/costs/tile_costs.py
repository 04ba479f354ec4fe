"""Costs of an item of each tile shape on one GPU: the numbers behind `auto`."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TileCosts:
    """Times of items and partial results, in nanoseconds, as `deft tune` measures them.

    An item of tile shape ``t`` with ``n`` KV tokens takes ``item_ns[t] + n * token_ns[t]``, while
    every program of that shape is busy.
    """

    # For the small tile and the large tile: the time of an item, and of one KV token of one KV
    # head.
    item_ns: tuple[float, ...]
    token_ns: tuple[float, ...]
    partial_ns: float  # time of the whole GPU to write and merge one partial result, all heads
    reduce_ns: float  # time of the launch of stage 2

    def __post_init__(self) -> None:
        if len(self.item_ns) != len(self.token_ns) or not self.item_ns:
            raise ValueError(
                f"item_ns has {len(self.item_ns)} entries and token_ns {len(self.token_ns)}; "
                "expected one for each tile shape in both"
            )
        for name, values in (
            ("item_ns", self.item_ns),
            ("token_ns", self.token_ns),
            ("partial_ns", (self.partial_ns,)),
            ("reduce_ns", (self.reduce_ns,)),
        ):
            for value in values:
                if not math.isfinite(value) or value <= 0:
                    raise ValueError(f"{name} holds {value}; expected numbers above 0")

    def as_array(self) -> npt.NDArray[np.float64]:
        """item_ns, token_ns, partial_ns and reduce_ns in one array, for compiled code."""
        return np.array([*self.item_ns, *self.token_ns, self.partial_ns, self.reduce_ns])

"""What an item of each tile shape costs on one GPU: the constants behind `auto`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TileCosts:
    """Times of stage 1's items and of partial results, as `deft tune` measures them.

    An item of shape ``t`` with ``n`` KV tokens keeps its program ``item_ns[t] + n * token_ns[t]``
    busy while every program of that shape is.

    Attributes
    ----------
    item_ns, token_ns : tuple of float
        For each tile shape of one KV range, smallest first: nanoseconds an item, and a KV token of
        one KV head.
    partial_ns : float
        Nanoseconds of the whole GPU to write and merge one query's partial result, all heads.
    reduce_ns : float
        Nanoseconds of stage 2 beside that: its launch.
    """

    item_ns: tuple[float, ...]
    token_ns: tuple[float, ...]
    partial_ns: float
    reduce_ns: float

    def __post_init__(self) -> None:
        if len(self.item_ns) != len(self.token_ns) or not self.item_ns:
            raise ValueError(
                f"item_ns has {len(self.item_ns)} entries and token_ns {len(self.token_ns)}; "
                "expected one a tile shape in both"
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

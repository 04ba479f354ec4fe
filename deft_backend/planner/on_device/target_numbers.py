"""What the device planner's kernels take from a target: capacities, programs and costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deft_backend.policies import PolicyError, Target


@dataclass(frozen=True)
class Numbers:
    """What the kernels take from a target."""

    target: Target
    tiles: tuple[int, int]  # queries that the small tile and the large tile serve
    per_item: tuple[tuple[float, float], ...]
    """Nanoseconds of an item and of one of its tokens, for the small tile and the large tile."""
    partial_ns: float
    reduce_ns: float  # see :class:`~deft_backend.costs.cost_model.TileCosts`
    sms: float  # SMs for each KV head
    estimate: tuple[tuple[float, ...], ...]
    """The fields of :class:`~deft_backend.planner.on_device.tiles.Estimate`."""

    def programs(self, queries: int) -> tuple[int, int]:
        """Programs of the small tile and of the large tile in a batch of so many queries."""
        small, large, *_ = self.target.programs_for(queries)
        return small, large

    @classmethod
    def of(cls, target: Target) -> Numbers:
        """The numbers of a target.

        Raises PolicyError if the cost table was measured for other tile shapes.
        """
        model = target.costs
        tiles = target.single_range_tiles
        if len(tiles) != 2 or len(model.tiles.item_ns) != 2:
            raise PolicyError(
                f"{len(tiles)} tile shapes for one KV range and costs of "
                f"{len(model.tiles.item_ns)}; expected 2 of both: measure this version's kernels "
                "with `deft tune`"
            )
        item_ns, token_ns = (map(float, ns) for ns in (model.tiles.item_ns, model.tiles.token_ns))
        return cls(
            target=target,
            tiles=(tiles[0], tiles[1]),
            per_item=tuple(zip(item_ns, token_ns, strict=True)),
            partial_ns=float(target.partial_ns),
            reduce_ns=float(model.tiles.reduce_ns),
            sms=target.num_sms / target.num_kv_heads,
            estimate=_estimate(model.tokens, target.estimates()),
        )


def _estimate(
    knots: npt.NDArray[np.float64], times_ns: npt.NDArray[np.float64]
) -> tuple[tuple[float, ...], ...]:
    """``C_est`` as a line and its bends: knots [K], and times of each tile shape [2, K]."""
    rises = np.diff(times_ns, axis=1) / np.diff(knots)
    at_zero = times_ns[:, :1] - knots[0] * rises[:, :1]
    lines = np.hstack([at_zero, rises[:, :1], np.diff(rises, axis=1)])
    return (tuple(knots[1:-1].tolist()), *(tuple(line) for line in lines.tolist()))

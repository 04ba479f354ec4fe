"""FlashForge's cost table (section 5.2): C_est(n_q, n) with one thread block on each SM."""

from collections.abc import Callable
from typing import Any

import numpy as np

from deft_backend.policies import Target
from deft_backend.tools.tuning.grids import Grid
from deft_backend.tools.tuning.machine import Work


def table_queries(target: Target) -> tuple[int, ...]:
    """``n_q`` of the table in queries: powers of two, up to the largest tile."""
    most = max(2, target.largest_tile)
    return tuple(1 << bit for bit in range(most.bit_length()))


def measure_block_times(
    time_us: Callable[[Work], float], target: Target, num_sms: int, grid: Grid
) -> dict[str, Any]:
    """The fields of a :class:`~deft_backend.costs.CostModel` that hold C_est.

    In each launch, every SM runs one block of a shape. The launch ends with its last block. So a
    block's time includes the effect of the other blocks on the GPU.
    """
    groups = max(1, num_sms // target.num_kv_heads)
    queries = table_queries(target)

    # Take the shorter median: an interruption of the machine says nothing about the kernel.
    measured = np.array(
        [
            [
                min(time_us(Work(groups, q, n)) for _ in range(grid.repetitions))
                for q in queries
            ]
            for n in grid.table_tokens
        ]
    )  # fmt: skip
    # Clock noise must not give more tokens or more query vectors less time.
    times = np.maximum.accumulate(np.maximum.accumulate(measured / 1e3, axis=0), axis=1)
    tokens = np.array(grid.table_tokens, dtype=np.float64)
    slope = (times[1, 0] - times[0, 0]) / (tokens[1] - tokens[0])
    return {
        "query_rows": np.array(queries, dtype=np.float64) * target.gqa_group,
        "tokens": tokens,
        "time_ms": np.round(times, 6),
        "launch_ms": round(max(0.0, float(times[0, 0] - slope * tokens[0])), 6),
    }

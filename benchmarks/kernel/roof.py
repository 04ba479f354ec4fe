"""The roof: a time that no kernel can beat, from ceilings measured in the same run."""

from __future__ import annotations

from benchmarks.kernel.case_inputs import Inputs
from deft_backend.tools.tuning.ceilings import Ceilings


def roof_us(inputs: Inputs, ceilings: Ceilings) -> float:
    """Lower bound for the microseconds of any kernel.

    The larger of two times. One is for the bytes that must move (KV once, queries in, outputs out)
    at the read bandwidth. The other is for the operations of :attr:`Inputs.flops` at the rate of a
    matrix product.
    """
    moved = inputs.kv_bytes + 2 * inputs.q.nbytes
    return max(moved / ceilings.read_gb_s / 1e3, inputs.flops / ceilings.tflop_s / 1e6)

"""The GPU's limits: what its memory and its tensor cores reach on this machine."""

from dataclasses import asdict, dataclass

import torch

from deft_backend.tools.tuning.measure import median_ms, read_gb_s

_PRODUCT = 8192


@dataclass(frozen=True)
class Ceilings:
    read_gb_s: float  # bytes that a large reduction reads, per second
    tflop_s: float  # a product of two 8192 × 8192 matrices of the dtype

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


def measure_ceilings(dtype: torch.dtype) -> Ceilings:
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device="cuda").to(dtype) for _ in range(2))
    product_ms = median_ms(lambda: a @ b)
    return Ceilings(read_gb_s(), tflop_s=2 * _PRODUCT**3 / product_ms / 1e9)

"""The highest rates at which this machine's GPU reads, copies and multiplies, as measured."""

from dataclasses import asdict, dataclass

import torch
import triton

_READ_BYTES = 4 << 30
_PRODUCT = 8192


@dataclass(frozen=True)
class Ceilings:
    """The highest measured rates of a device."""

    read_gb_s: float  # bytes that a large reduction reads, per second
    copy_gb_s: float  # bytes that a large copy reads and writes, per second
    tflop_s: float  # a product of two 8192 × 8192 matrices of the dtype

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


def measure_ceilings(dtype: torch.dtype) -> Ceilings:
    """Measure this GPU's ceilings; a second or so."""
    read_ms, copy_ms = _memory_ms()
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device="cuda").to(dtype) for _ in range(2))
    product_ms = _median_ms(lambda: a @ b)
    return Ceilings(
        read_gb_s=max(_READ_BYTES / read_ms, _READ_BYTES / copy_ms) / 1e6,
        copy_gb_s=_READ_BYTES / copy_ms / 1e6,
        tflop_s=2 * _PRODUCT**3 / product_ms / 1e9,
    )


def _memory_ms() -> tuple[float, float]:
    """Milliseconds to read a large buffer, and to copy one half of it over the other half."""
    large = torch.zeros(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    half = len(large) // 2
    # Of two reductions, the faster one is closer to the memory's bandwidth.
    read_ms = min(_median_ms(lambda: large.sum()), _median_ms(lambda: large.amax()))
    return read_ms, _median_ms(lambda: large[:half].copy_(large[half:]))


def _median_ms(work: object) -> float:
    time: float = triton.testing.do_bench(work, warmup=25, rep=100, return_mode="median")
    return time

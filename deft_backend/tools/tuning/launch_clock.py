"""GPU time of a kernel launch inside a CUDA graph, with a cold L2 cache."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton

_WARMUP_MS = 10


@dataclass(frozen=True)
class Budget:
    launch_ms: int = 40


QUICK = Budget(launch_ms=15)


def captured(launch: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph of a launch, as in a server, and the tensor that its replays write."""
    launch()  # compile the kernels, allocate memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    return graph.replay, out


def launch_us(launch: Callable[[], object], budget: Budget) -> float:
    """Median GPU microseconds of a launch; the L2 cache is flushed before each repetition."""
    time_ms: float = triton.testing.do_bench(
        launch, warmup=_WARMUP_MS, rep=budget.launch_ms, return_mode="median"
    )
    return time_ms * 1e3


_READ_BYTES = 4 << 30
_PRODUCT = 8192


@dataclass(frozen=True)
class Ceilings:
    read_gb_s: float  # bytes that a large reduction reads, per second
    copy_gb_s: float  # bytes that a large copy reads and writes, per second
    tflop_s: float  # a product of two 8192 × 8192 matrices of the dtype

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


def measure_ceilings(dtype: torch.dtype) -> Ceilings:
    read_ms, copy_ms = _memory_ms()
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device="cuda").to(dtype) for _ in range(2))
    product_ms = _median_ms(lambda: a @ b)
    return Ceilings(
        read_gb_s=max(_READ_BYTES / read_ms, _READ_BYTES / copy_ms) / 1e6,
        copy_gb_s=_READ_BYTES / copy_ms / 1e6,
        tflop_s=2 * _PRODUCT**3 / product_ms / 1e9,
    )


def _memory_ms() -> tuple[float, float]:
    large = torch.zeros(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    half = len(large) // 2
    # Of two reductions, the faster one is closer to the memory's bandwidth.
    read_ms = min(_median_ms(lambda: large.sum()), _median_ms(lambda: large.amax()))
    return read_ms, _median_ms(lambda: large[:half].copy_(large[half:]))


def _median_ms(work: object) -> float:
    time: float = triton.testing.do_bench(work, warmup=25, rep=100, return_mode="median")
    return time

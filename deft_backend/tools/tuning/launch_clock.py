"""GPU time of a kernel launch inside a CUDA graph, with a cold L2 cache."""

from collections.abc import Callable

import torch
import triton

_WARMUP_MS = 10


LAUNCH_MS = 40  # for which a launch is repeated


def captured(launch: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph of a launch, as in a server, and the tensor that its replays write."""
    launch()  # compile the kernels, allocate memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    return graph.replay, out


def launch_us(launch: Callable[[], object], rep_ms: int) -> float:
    """Median GPU microseconds of a launch; the L2 cache is flushed before each repetition."""
    time_ms: float = triton.testing.do_bench(
        launch, warmup=_WARMUP_MS, rep=rep_ms, return_mode="median"
    )
    return time_ms * 1e3


_READ_BYTES = 4 << 30


def read_gb_s() -> float:
    """Bytes that a large reduction or a copy reads, in 1e9 per second."""
    large = torch.zeros(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    # Of two reductions, the faster one is closer to the memory's bandwidth.
    read_ms = min(median_ms(lambda: large.sum()), median_ms(lambda: large.amax()), copy_ms(large))
    return _READ_BYTES / read_ms / 1e6


def copy_ms(large: torch.Tensor) -> float:
    """Milliseconds of a copy from one half of a tensor into the other."""
    half = len(large) // 2
    return median_ms(lambda: large[:half].copy_(large[half:]))


def median_ms(work: Callable[[], object]) -> float:
    time: float = triton.testing.do_bench(work, warmup=25, rep=100, return_mode="median")
    return time

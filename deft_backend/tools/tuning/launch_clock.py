"""GPU time of a kernel launch inside a CUDA graph, with a cold L2 cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

_WARMUP_MS = 10


@dataclass(frozen=True)
class Budget:
    """Measuring time: milliseconds of repetitions for a launch, seconds for a kind of plan."""

    launch_ms: int = 40
    plan_s: float = 0.1


QUICK = Budget(launch_ms=15, plan_s=0.03)


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

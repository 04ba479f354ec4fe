"""vLLM's sleep mode: keep the plan and the workspace in place while the server gives up its memory.

A server that can sleep allocates its KV cache, and everything it makes with the cache, in memory
pools. It unmaps the pages of these pools when it sleeps. Captured graphs hold the addresses of our
plan and workspace, so both must lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

HIDDEN_BATCH = (
    "a server that can sleep shows no batch: its page table may be unmapped while it is read"
)
"""The answer of a server that can sleep to `deft explain --server`."""


def can_sleep(vllm_config: Any) -> bool:
    """Whether a server may unmap its memory, by sleep mode or only by its allocator."""
    model = vllm_config.model_config
    return any(
        getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator")
    )


def outside_memory_pools(make: Callable[[], T], device: torch.device) -> T:
    """Run `make` outside the calling thread's memory pools.

    PyTorch's ``use_mem_pool`` redirects only the allocations of the thread that entered it. So
    `make` runs in its own thread.

    Raises
    ------
    Exception
        Any error of `make`.
    """

    def run() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="deft-set-up") as thread:
        return thread.submit(run).result()

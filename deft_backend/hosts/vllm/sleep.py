"""vLLM's sleep mode: what must stay in place while the server gives its memory away.

A server that can sleep allocates its KV cache, and whatever it makes with it, in memory pools
whose pages it unmaps when it sleeps. Captured graphs hold the addresses of our plan and workspace,
so both must lie elsewhere.
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
"""The answer of such a server to `deft explain --server`."""


def can_sleep(vllm_config: Any) -> bool:
    """Whether a server may unmap its memory: by the mode, or by the allocator alone."""
    model = vllm_config.model_config
    return any(
        getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator")
    )


def outside_memory_pools(make: Callable[[], T], device: torch.device) -> T:
    """Run `make` so that no memory pool of the calling thread takes what it allocates.

    PyTorch's ``use_mem_pool`` routes the allocations of the thread that entered it, and of no
    other. So `make` runs in a thread of its own.

    Raises
    ------
    Exception
        What `make` raises.
    """

    def run() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="deft-set-up") as thread:
        return thread.submit(run).result()

"""Where the zoo's engines run: the host, the device, and what both ask of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.zoo.architectures import VOCABULARY
from deft_backend.tools.servers.command import BACKEND_NAMES, free_port
from deft_backend.tools.servers.driver_stub import ensure_driver_stub, has_nvidia_driver

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Where the engines run.

    Attributes
    ----------
    host : str
        "sglang" or "vllm".
    gpu : bool
    share : float
        Part of the GPU's memory for one engine of vLLM.
    asked : mapping
        Arguments of the engine that the caller asks for; they replace this class's own.
    """

    host: str
    gpu: bool
    share: float = 0.06
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The host's name for tree attention, which answers."""
        return BACKEND_NAMES[self.host]

    @property
    def in_one_process(self) -> bool:
        """Whether one process can make engine after engine."""
        return self.host == "vllm" and not self.gpu

    @property
    def requests(self) -> dict[str, int]:
        """Arguments of the requests: short ones on the CPU, whose kernels are interpreted."""
        if self.gpu:
            return {"ids": VOCABULARY, "prefix": 1500, "branch": 300, "leaves": 12, "tokens": 48}
        return {"ids": VOCABULARY, "prefix": 90, "branch": 30, "leaves": 2, "tokens": 8}

    @property
    def kv_dtype(self) -> str | None:
        """The KV cache's dtype if the caller asks for one."""
        return self.asked.get("kv_cache_dtype")

    def options(self) -> dict[str, Any]:
        """Arguments of the engine, which has a port of its own."""
        return {**self._own_options(), **self.asked}

    def _own_options(self) -> dict[str, Any]:
        if self.host == "sglang":
            port = {"port": free_port()}
            if not self.gpu:
                return {
                    **port, "device": "cpu", "max_total_tokens": 16384, "max_running_requests": 16,
                }  # fmt: skip
            return {
                **port,
                "mem_fraction_static": 0.8, "max_total_tokens": 100_000,
                "max_running_requests": 64, "max_mamba_cache_size": 192,
                "cuda_graph_bs_decode": [1, 8, 16, 32], "cuda_graph_backend_prefill": "disabled",
            }  # fmt: skip
        common: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 32}
        if not self.gpu:
            return {**common, "enforce_eager": True}
        # The share is what vLLM wants to find free. The cache's size does not depend on what other
        # engines take meanwhile.
        return {**common, "gpu_memory_utilization": self.share, "kv_cache_memory_bytes": 2 << 30}

    def environment(self, gpu_index: int = 0) -> dict[str, str]:
        """The engine's environment, on one of the GPUs."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        found |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        found |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.gpu:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            found["CUDA_VISIBLE_DEVICES"] = shown[gpu_index] if shown[0] else str(gpu_index)
            return found
        found |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        found |= {"DEFT_PLANNER": "host"}  # quick to interpret
        if self.host == "sglang" and not has_nvidia_driver():
            paths = [str(ensure_driver_stub()), os.environ.get("LD_LIBRARY_PATH", "")]
            found["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        return found

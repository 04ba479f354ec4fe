"""Run some steps with prefills without a graph, although a graph of their size was captured.

Changes, on ``ModelCudaGraphManager`` of model runner V2 (vLLM 0.33), for a server with a rule:
    ``dispatch`` answers as if a step had no graph, if the rule leaves its graph.
Why: tree attention asks for larger graphs than vLLM, and only the CPU knows what requests share.
Harmless to managers without a rule: the wrapper only calls the host's method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deft_patches.wrapping import wrap

rules: dict[int, Callable[[int, int | None], bool]] = {}
"""By the id of a server's configuration; a process has one server at a time. A rule hears of every
step: its tokens, and the tokens of each request if these are equal."""


def install(vllm_config: Any, leaves: Callable[[int, int | None], bool]) -> None:
    """Give a server a rule, which is true for steps to run without a graph."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    wrap(ModelCudaGraphManager, "dispatch", _dispatch)
    rules.clear()
    rules[id(vllm_config)] = leaves


def _dispatch(original: Callable[..., Any], manager: Any, *sizes: Any, **named: Any) -> Any:
    leaves = rules.get(id(manager.vllm_config))
    if leaves is not None and len(sizes) == 3 and leaves(*sizes[1:]):
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CUDAGraphMode

        return BatchExecutionDescriptor(CUDAGraphMode.NONE, sizes[1], sizes[0])
    return original(manager, *sizes, **named)

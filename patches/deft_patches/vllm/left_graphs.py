"""Run some steps with prefills without a graph, although a graph of their size was captured.

Changes, on ``ModelCudaGraphManager`` of model runner V2 (vLLM 0.33), for servers with a rule:
    ``dispatch`` answers as if a step had no graph, if it prefills and the rule leaves its graph.
Why: tree attention asks for larger graphs than vLLM, and only the CPU knows what requests share.
Harmless to managers without a rule: the wrapper only calls the host's method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deft_patches.wrapping import wrap

_rules: dict[int, Callable[[int], bool]] = {}  # by the id of the server's configuration


def install(vllm_config: Any, leaves: Callable[[int], bool]) -> None:
    """Give a server a rule: whether a step of so many tokens, some of prompts, has no graph."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    wrap(ModelCudaGraphManager, "dispatch", _dispatch)
    _rules.clear()  # a process serves one configuration
    _rules[id(vllm_config)] = leaves


def _dispatch(original: Callable[..., Any], manager: Any, *sizes: Any, **named: Any) -> Any:
    """`sizes`: requests, tokens, and the tokens of each request if these are equal."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    leaves = _rules.get(id(manager.vllm_config))
    if leaves is not None and len(sizes) == 3 and sizes[2] is None and leaves(sizes[1]):
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, sizes[1], sizes[0])
    return original(manager, *sizes, **named)

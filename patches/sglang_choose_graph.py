"""Let a batch that tree attention decodes run outside the decode CUDA graph.

Changes: wraps ``DecodeCudaGraphRunner.can_run_graph(forward_batch)`` (SGLang 0.5.17): false for
    the batches that we say; for all others the host's own answer.
Why: the host's graphs hold its own decode kernel, and whether a batch shares enough for ours is
    known on the host before every step. Turning graphs off would slow batches that share nothing;
    with this they replay the host's graph as if the plugin were not there.
Looks for: the class, and the method taking ``forward_batch`` alone.
Harmless to other batches: a chooser that fails is dropped, and the host decides as before.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

TARGET = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph"
)

Chooser = Callable[[Any, Any], bool]
"""Called with the graph runner and the forward batch; True: not through the graph."""

_choosers: list[Chooser] = []


def missing() -> str | None:
    """What the host lacks, in one line, or None."""
    try:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
            DecodeCudaGraphRunner,
        )
    except ImportError:
        return "there is no DecodeCudaGraphRunner"
    method = getattr(DecodeCudaGraphRunner, "can_run_graph", None)
    if method is None:
        return "DecodeCudaGraphRunner has no can_run_graph"
    parameters = list(inspect.signature(inspect.unwrap(method)).parameters)
    if parameters != ["self", "forward_batch"]:
        return f"can_run_graph takes {parameters}, not (self, forward_batch)"
    return None


def install(chooser: Chooser) -> None:
    """Ask `chooser` before every decode graph; may be called at any time, several times."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _choosers:
        HookRegistry.register(TARGET, _choose, HookType.AROUND)
    _choosers.append(chooser)
    HookRegistry.apply_hooks()


def _choose(original: Callable[[Any, Any], bool], runner: Any, forward_batch: Any) -> bool:
    for chooser in tuple(_choosers):
        try:
            if chooser(runner, forward_batch):
                return False
        except Exception as error:
            _choosers.remove(chooser)
            logger.warning("deft: choosing between kernels failed and was dropped: %r", error)
    return original(runner, forward_batch)

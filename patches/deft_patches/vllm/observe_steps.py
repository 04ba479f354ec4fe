"""Show an observer what the scheduler tells a worker about each step.

Changes: wraps the method ``WorkerWrapperBase.execute_model(scheduler_output)`` (vLLM 0.26 to 0.33);
    its result is unchanged.
Why: attention backends do not learn the requests of a batch. The scheduler's message tells them
    and their blocks, in CPU memory, so nobody waits for the GPU.
Harmless to other servers: the observer only reads, and the patch drops an observer that fails.
    Workers under Ray do not use the method: there the observer sees nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deft_patches.wrapping import wrap

logger = logging.getLogger(__name__)

Observer = Callable[[Any], None]  # called with the ``SchedulerOutput`` of a step

_observers: list[Observer] = []


def install(observer: Observer) -> None:
    """Call `observer` before every step of this process's worker."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrap(WorkerWrapperBase, "execute_model", _observe)
    _observers.append(observer)


def remove(observer: Observer) -> None:
    if observer in _observers:
        _observers.remove(observer)


def _observe(
    original: Callable[..., Any], worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    for observer in tuple(_observers):
        try:
            observer(scheduler_output)
        except Exception as error:
            remove(observer)  # one that it has removed itself, too
            logger.warning(
                "deft: an observer of the host's steps failed (%r). What needs it stops: counts, "
                "mixed steps or the choice of MLA's graphs; restart the server to get it back",
                error,
            )
    return original(worker, scheduler_output, *args, **kwargs)

"""Show observers the scheduler's requests of every forward batch.

Changes: wraps the class method ``ForwardBatch.init_new(batch, model_runner, ...)`` (SGLang 0.5.17
    to 0.5.23); its result is unchanged.
Why: attention backends get a ``ForwardBatch``, which holds request ids but neither the requests'
radix-tree nodes nor the tree. ``init_new`` makes it from the scheduler's batch. It runs on the same
thread right before the forward, so the tree cannot change in between. A backend recognises its
batch by the identity of the list ``rids``, because the host replaces the batch object on the way.
Harmless to other batches: observers only read, and the patch drops an observer that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from deft_patches.wrapping import wrap

logger = logging.getLogger(__name__)

Observer = Callable[[Any, Any, Any], None]
"""Called with the new ForwardBatch, the scheduler's batch and the model runner."""

_observers: dict[Observer, None] = {}  # in the order in which they are called


def install(observer: Observer) -> Callable[[], object]:
    """Call `observer` after every ``init_new``, until the returned function is called."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    wrap(ForwardBatch, "init_new", _observe)
    _observers[observer] = None
    return partial(_observers.pop, observer, None)


def _observe(
    original: Callable[..., Any], cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any
) -> Any:
    forward_batch = original(cls, batch, model_runner, *args, **kwargs)
    for observer in tuple(_observers):
        try:
            observer(forward_batch, batch, model_runner)
        except Exception as error:
            _observers.pop(observer, None)
            logger.warning(
                "deft: an observer of the host's batches failed (%r). What needs it stops: MLA's "
                "plans or choices in steps without a graph; restart the server to get it back",
                error,
            )
    return forward_batch

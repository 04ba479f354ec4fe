"""Show observers the scheduler's requests of every forward batch.

Changes: wraps the class method ``ForwardBatch.init_new(batch, model_runner, ...)`` (SGLang 0.5.17
    to 0.5.23); its result is unchanged.
Why: attention backends get a ``ForwardBatch``, which holds request ids but neither the requests'
radix-tree nodes nor the tree. ``init_new`` makes it from the scheduler's batch. It runs on the same
thread right before the forward, so the tree cannot change in between. Looks for: ``init_new`` with
the parameters ``batch`` and ``model_runner``, and the field ``rids``. A backend recognises its
batch by the identity of the list ``rids``, because the host replaces the batch object on the way.
Harmless to other batches: observers only read, and the patch drops an observer that fails.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from deft_patches.wrapping import wrap

logger = logging.getLogger(__name__)

FIELDS = ("forward_mode", "batch_size", "rids", "req_pool_indices", "seq_lens", "seq_lens_cpu",
          "seq_lens_sum", "out_cache_loc")  # fmt: skip

Observer = Callable[[Any, Any, Any], None]
"""Called with the new ForwardBatch, the scheduler's batch and the model runner."""

_observers: list[Observer] = []


def missing() -> str | None:
    """What the host lacks for this patch, in one line; or None."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    init_new = getattr(ForwardBatch, "init_new", None)
    if init_new is None:
        return "ForwardBatch has no init_new"
    parameters = list(inspect.signature(inspect.unwrap(init_new)).parameters)
    if [name for name in parameters if name != "cls"][:2] != ["batch", "model_runner"]:
        return f"ForwardBatch.init_new takes {parameters}, not (batch, model_runner, ...)"
    known = {field.name for field in fields(ForwardBatch)}
    absent = [name for name in FIELDS if name not in known]
    return f"ForwardBatch has no field {absent[0]}" if absent else None


def install(observer: Observer) -> None:
    """Call `observer` after every ``init_new``. Adapters may install at any time, several times."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    wrap(ForwardBatch, "init_new", _observe)
    _observers.append(observer)


def remove(observer: Observer) -> None:
    """Stop calling `observer`."""
    if observer in _observers:
        _observers.remove(observer)


def _observe(original: Callable[..., Any], cls: Any, batch: Any, model_runner: Any, *args: Any,
             **kwargs: Any) -> Any:  # fmt: skip
    forward_batch = original(cls, batch, model_runner, *args, **kwargs)
    for observer in tuple(_observers):
        try:
            observer(forward_batch, batch, model_runner)
        except Exception as error:
            _observers.remove(observer)
            logger.warning("deft: batches are no longer observed: an observer failed (%r)", error)
    return forward_batch

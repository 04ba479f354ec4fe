"""Page-table writes wait for decode graphs that read page tables while they run.

Changes, on ``DecodeCudaGraphRunner`` (SGLang 0.5.17 alone) or the class that a model runner has
    instead, for runners that have a reader:
    ``execute``: if the reader says that a replay may read page tables, later writes to them wait
    for the whole forward. The host allows them once it has read its metadata, before the replay.
Why: tree attention reads page tables during the replay. With overlap on, the host prepares the next
    batch meanwhile, and may give a request's row to another. Later versions ask the backend.
Harmless to runners without a reader: the wrapper only calls the host's method.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from deft_patches.wrapping import graph_runner, wrap

FENCE = "war_fastpath_read_done_event"
"""Attribute of the model runner: the event after which the host may write page tables. None means
the end of the forward."""

Reader = Callable[[Any], bool]
"""Whether graphs of a forward mode may read page tables."""

_readers: dict[int, Reader] = {}  # by the id of the model runner


def install(model_runner: Any, reader: Reader) -> Callable[[], object]:
    """Hold page-table writes for those replays of `model_runner` that `reader` names.

    The returned function leaves all replays to the host's own fence again.
    """
    wrap(graph_runner(model_runner), "execute", _execute)
    _readers[id(model_runner)] = reader
    return partial(_readers.pop, id(model_runner), None)


def _execute(original: Any, runner: Any, forward_batch: Any, pp_proxy_tensors: Any = None) -> Any:
    output = original(runner, forward_batch, pp_proxy_tensors)
    reader = _readers.get(id(runner.model_runner))
    if reader is not None and reader(forward_batch.forward_mode):
        setattr(runner.model_runner, FENCE, None)
    return output

"""The scheduler's side of the forward batch that is being made ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Observed:
    """Requests and tree behind a forward batch."""

    rids: Any
    """The forward batch's own list of request ids; its identity names the batch."""
    requests: Sequence[Any]
    tree_cache: Any


class BatchObserver:
    """Remembers the last decode batch that was made for one model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._last: Observed | None = None

    def observe(self, forward_batch: Any, batch: Any, runner: Any) -> None:
        """Observer of ``ForwardBatch.init_new``."""
        if runner is not self._runner:
            return
        self._last = None
        if forward_batch.forward_mode.is_decode():
            self._last = Observed(forward_batch.rids, batch.reqs, batch.tree_cache)

    def of(self, forward_batch: Any) -> Observed | None:
        """What is behind `forward_batch`, or None if it was not made from the last batch seen.

        The host hands backends a copy of the object; the list of ids is the same one. Dummy
        batches (warm-up, capture, idle ranks) have none.
        """
        last = self._last
        if last is None or last.rids is None or last.rids is not forward_batch.rids:
            return None
        return last

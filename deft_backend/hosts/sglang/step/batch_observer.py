"""The scheduler's requests of the latest forward batch."""

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
    """Remembers the last decode batch that the host made for one model runner."""

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
        """Requests and tree of `forward_batch`; None if the last observed batch is another one.

        The host gives backends a copy of the object, with the same list of ids. Dummy batches
        (warm-up, capture, idle ranks) have no requests.
        """
        last = self._last
        if last is None or last.rids is None or last.rids is not forward_batch.rids:
            return None
        return last

"""Which blocks of the KV cache a worker's requests hold, from the scheduler's messages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0  # vLLM's block for tokens that a sliding window has left behind


class CachedPrefixes:
    """Knows the blocks of a worker's requests, from the messages before each step.

    All ranks get the same messages, so they decide alike by them, and nobody waits for the GPU.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, npt.NDArray[np.int32]] = {}
        self._later: dict[str, list[Any]] = {}  # what :meth:`blocks_of` adds to `_blocks`
        self.scheduled: Mapping[str, int] = {}  # tokens of each request in the next step

    def observe(self, message: Any) -> None:
        """Observer of the scheduler's messages (``SchedulerOutput``)."""
        for request in message.finished_req_ids:
            self._blocks.pop(request, None)
            self._later.pop(request, None)
        for new in message.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
        cached = message.scheduled_cached_reqs
        resumed, changes = cached.resumed_req_ids, cached.new_block_ids
        # Every step pays for this line, but few requests get blocks in a step.
        changed = zip(compress(cached.req_ids, changes), filter(None, changes), strict=True)
        for request, blocks in changed:
            if resumed and request in resumed:
                self._begin(request, blocks)
            elif request in self._blocks:
                self._later.setdefault(request, []).append(blocks)
        self.scheduled = message.num_scheduled_tokens

    def _begin(self, request: str, blocks: Any) -> None:
        """A request has these blocks alone: a new one, or one that was preempted."""
        self._blocks[request] = _blocks_of(blocks)
        self._later.pop(request, None)

    def blocks_of(self, request: str) -> npt.NDArray[np.int32] | None:
        """A request's blocks; None for an unknown request.

        This adds the blocks that the request got later. Most steps ask for none.
        """
        later = self._later.pop(request, None)
        if later is not None:
            groups = [list(chain.from_iterable(parts)) for parts in zip(*later, strict=True)]
            self._blocks[request] = np.concatenate((self._blocks[request], _blocks_of(groups)))
        return self._blocks.get(request)


def _blocks_of(groups: Any) -> npt.NDArray[np.int32]:
    """A request's blocks in the group of caches with most of them: that of full attention."""
    tables = [np.array(blocks, dtype=np.int32) for blocks in groups or ((),)]
    held = [table[table != NULL_BLOCK] for table in tables]
    return max(held, key=len)

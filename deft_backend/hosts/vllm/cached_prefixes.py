"""Which blocks of the KV cache a worker's requests hold, from the scheduler's messages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0  # vLLM's block for tokens that a sliding window has left behind


class CachedPrefixes:
    """Knows the blocks of a worker's requests, from the messages before each step. All ranks get
    the same messages, so they decide alike by them, and nobody waits for the GPU.
    """

    keeps_generated = False  # whether to keep blocks that a request gets once it decodes

    def __init__(self, block_tokens: int, query_tokens: int = 1) -> None:
        self.block_tokens = block_tokens
        self._query_tokens = query_tokens
        self._blocks: dict[str, npt.NDArray[np.int32]] = {}
        self._later: dict[str, list[Any]] = {}  # what :meth:`blocks_of` adds to `_blocks`
        self.scheduled: Mapping[str, int] = {}  # tokens of each request in the next step
        self._prompts: set[str] = set()  # requests that have not decoded yet
        # The blocks of each request at its first decode step; the blocks that it gets later are its
        # own. And how many of these requests hold a block.
        self._decoding: dict[str, npt.NDArray[np.int32]] = {}
        self._holders = np.zeros(1, dtype=np.int32)
        self._repeats = 0  # blocks of a request that an earlier one holds, too

    @property
    def shared_tokens(self) -> int:
        """Tokens that decoding the requests together reads less often than one by one."""
        return self._repeats * self.block_tokens

    def observe(self, message: Any) -> None:
        for request in chain(message.finished_req_ids, message.preempted_req_ids or ()):
            self._forget(request)
        for new in message.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
        cached = message.scheduled_cached_reqs
        resumed, changes = cached.resumed_req_ids, cached.new_block_ids
        # Every step pays for this line, but few requests get blocks in a step.
        changed = zip(compress(cached.req_ids, changes), filter(None, changes), strict=True)
        for request, blocks in changed:
            if resumed and request in resumed:
                self._begin(request, blocks)
            elif request in self._blocks and (self.keeps_generated or request in self._prompts):
                self._later.setdefault(request, []).append(blocks)
        self.scheduled = message.num_scheduled_tokens
        for request in [*self._prompts]:
            if 0 < self.scheduled.get(request, 0) <= self._query_tokens:
                self._decode(request)

    def _begin(self, request: str, blocks: Any) -> None:
        self._forget(request)
        self._blocks[request] = _blocks_of(blocks)
        self._prompts.add(request)

    def _decode(self, request: str) -> None:
        self._prompts.remove(request)
        blocks = self.blocks_of(request)
        if blocks is None or not len(blocks):
            return
        most = int(blocks.max())
        if most >= len(self._holders):
            self._holders = np.append(self._holders, np.zeros(most, dtype=np.int32))
        self._repeats += int(np.count_nonzero(self._holders[blocks]))
        self._holders[blocks] += 1
        self._decoding[request] = blocks

    def _forget(self, request: str) -> None:
        self._blocks.pop(request, None)
        self._later.pop(request, None)
        self._prompts.discard(request)
        blocks = self._decoding.pop(request, None)
        if blocks is not None:
            self._holders[blocks] -= 1
            self._repeats -= int(np.count_nonzero(self._holders[blocks]))

    def blocks_of(self, request: str) -> npt.NDArray[np.int32] | None:
        """A request's blocks; None for an unknown request."""
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

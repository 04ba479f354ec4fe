"""Short extends: prefill steps of a few new tokens a request that tree attention computes.

The builder decides without the device. What the requests share follows from the scheduler's
messages to this worker, which hold the block ids of each new request.
"""

from __future__ import annotations

from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.hosts.common.short_extends import ShortExtends
from deft_backend.hosts.vllm.step.group import GroupAttention
from deft_backend.hosts.vllm.step.step import TreeStep, context_tokens

LOOKED_AT = 1 << 14  # block ids of a batch that are compared; of more, every n-th of each request
NULL_BLOCK = 0  # vLLM's block for tokens that a sliding window has left behind


class CachedPrefixes:
    """Knows the blocks of a worker's requests, from the messages before each step."""

    keeps_new_blocks = False  # whether to keep blocks that a request gets after its first step

    def __init__(self) -> None:
        self._blocks: dict[str, npt.NDArray[np.int32]] = {}
        self._later: dict[str, list[Any]] = {}  # what :meth:`blocks_of` adds to `_blocks`
        self._scheduled: dict[str, int] = {}
        self._share: float | None = None
        self._seen = np.zeros(1, dtype=np.bool_)

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
        for request, blocks in changed if resumed or self.keeps_new_blocks else ():
            if resumed and request in resumed:
                self._begin(request, blocks)
            elif self.keeps_new_blocks and request in self._blocks:
                self._later.setdefault(request, []).append(blocks)
        self._scheduled, self._share = message.num_scheduled_tokens, None

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

    def share(self, requests: int, tokens: int) -> float | None:
        """Blocks of the last message's requests, divided by those that differ.

        None if the batch, of so many requests and new tokens, is not the last message's.
        """
        if len(self._scheduled) != requests or sum(self._scheduled.values()) != tokens:
            return None
        if self._share is None:
            self._share = self._compare()
        return self._share

    def _compare(self) -> float | None:
        blocks = [self._blocks.get(request) for request in self._scheduled]
        known = [each for each in blocks if each is not None and len(each)]
        if len(known) != len(blocks):
            return None
        step = 1 + sum(map(len, known)) // LOOKED_AT
        ids = np.concatenate([each[::step] for each in known])
        most = int(ids.max())
        if most >= len(self._seen):
            self._seen = np.zeros(2 * most + 1, dtype=np.bool_)
        self._seen[ids] = True
        differ = int(np.count_nonzero(self._seen))
        self._seen[ids] = False
        return len(ids) / differ


def _blocks_of(groups: Any) -> npt.NDArray[np.int32]:
    """A request's blocks in the group of caches with most of them: that of full attention."""
    tables = [np.array(blocks, dtype=np.int32) for blocks in groups or ((),)]
    held = [table[table != NULL_BLOCK] for table in tables]
    return max(held, key=len)


class Extends(NamedTuple):
    """Short extends of a group's layers."""

    group: GroupAttention  # the layers with the attention of `rule`
    rule: ShortExtends
    prefixes: CachedPrefixes

    def step(self, common: Any) -> TreeStep | None:
        """The step of a batch with new tokens of prompts; None if the host computes it."""
        size = self.rule.size_for(int(common.max_query_len))
        batch = int(common.num_reqs)
        if size is None or self.group.refuses(batch) is not None:
            return None
        # Within documents of a multimodal prompt, tokens attend to later tokens.
        if common.causal is not True or common.mm_req_doc_ranges:
            return None
        starts = common.query_start_loc_cpu[: batch + 1]
        tokens = int(starts[batch])
        attended = context_tokens(common)
        share = self.prefixes.share(int(starts.diff().count_nonzero()), tokens)
        if share is None or not self.rule.saves_enough(size, attended, attended / share):
            return None
        return TreeStep(
            self.group, common.block_table_tensor[:batch], common.seq_lens[:batch], tokens,
            query_tokens=size, query_start=common.query_start_loc[: batch + 1],
        )  # fmt: skip

"""Decide when a decode batch needs a new plan, and whether tree attention saves enough."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.attention import TreeAttention
from deft_backend.compile.clock import COMPILING
from deft_backend.forest import Int32Array, PrefixForest
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.sglang.prefixes.prefix_source import Key, PrefixSource, key_of
from deft_backend.planner import Plan
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState

logger = logging.getLogger("deft_backend")

GROWTH_TOKENS = 256
GROWTH_SHARE = 0.25
"""A plan is replaced once its requests have grown by more than both of these on average. The plan
balanced the leaves for their earlier lengths."""

CrossCheck = Callable[[PrefixForest, Any], str | None]
"""Compares a forest with its batch's rows of the page table; returns what differs, or None."""


@dataclass(frozen=True)
class Observed:
    """Requests and tree behind a forward batch."""

    rids: Any  # the forward batch's own list of request ids; its identity names the batch
    requests: Sequence[Any]
    tree_cache: Any
    table_rows: Any = None  # [B] int: each request's row of the page table, on the device

    @property
    def has_beams(self) -> bool:
        """Whether the batch has rows of beams, which have no request of their own."""
        return any(getattr(each, "beam_group", None) is not None for each in self.requests)


class BatchObserver:
    """Remembers the last decode batch that the host made for one model runner.

    With `verifies`, it remembers the last verification instead.
    """

    def __init__(self, runner: Any, *, verifies: bool = False) -> None:
        self._runner, self._verifies = runner, verifies
        self._last: Observed | None = None

    def observe(self, forward_batch: Any, batch: Any, runner: Any) -> None:
        """Observer of ``ForwardBatch.init_new``."""
        if runner is not self._runner:
            return
        self._last = None
        mode = forward_batch.forward_mode
        if mode.is_target_verify() if self._verifies else mode.is_decode():
            rows = forward_batch.req_pool_indices
            self._last = Observed(forward_batch.rids, batch.reqs, batch.tree_cache, rows)

    def of(self, forward_batch: Any) -> Observed | None:
        """Requests and tree of `forward_batch`; None if the last observed batch is another one.

        The host gives backends a copy of the object, with the same list of ids. Dummy batches
        (warm-up, capture, idle ranks) have no requests.
        """
        last = self._last
        if last is None or last.rids is None or last.rids is not forward_batch.rids:
            return None
        return last


@dataclass(frozen=True)
class BatchDecision:
    """The decision for a batch's composition, valid until the composition changes."""

    keys: list[Key]  # Composition of the batch, a key for each request
    requests: Sequence[Any]  # the requests, kept alive so that the ids in `keys` stay unique
    lens: Int32Array  # [B] int32; tokens of each request when the decision was made
    tokens: int  # tokens of all requests when the decision was made
    # Tokens that the plan's items load, and the number of open ranges, which grow by one token a
    # step.
    loaded: int = 0
    grows: int = 0
    host_reason: str | None = None  # why the host's kernel decodes the batch

    def loads(self, tokens: int) -> int:
        """Tokens that a step loads when all requests together hold `tokens`."""
        return self.loaded + self.grows * (tokens - self.tokens) // max(1, len(self.keys))

    def holds_for(self, keys: list[Key], seq_lens: npt.NDArray[np.integer], tokens: int) -> bool:
        """Whether the decision is valid for this step, by O(batch) comparisons.

        Requests must not have become shorter: the plan's ranges could end beyond their last tokens.
        """
        if keys != self.keys or not bool((seq_lens >= self.lens).all()):
            return False
        grown = tokens - self.tokens
        return grown <= max(GROWTH_TOKENS * len(keys), GROWTH_SHARE * self.tokens)


@dataclass
class DecodePlanner:
    """Keeps the plan of the current composition."""

    planner: TreeAttention
    source: PrefixSource
    settings: Settings
    state: ServerState
    cross_check: CrossCheck | None = None
    # Whether the host's kernel is faster than a plan, by the costs of the attention.
    loses: Callable[[Plan, PrefixForest], bool] | None = None
    current: BatchDecision | None = None

    def step(
        self, observed: Observed, seq_lens: npt.NDArray[np.integer], tokens: int
    ) -> BatchDecision:
        """Decide on a decode step; plan it if the composition changed.

        - `observed`: Requests, in batch order, and prefix cache of the batch.
        - `seq_lens` [B] int: tokens of each request, the one being decoded included.
        - `tokens`: Sum of `seq_lens`.
        """
        keys = [key_of(request) for request in observed.requests]
        current = self.current
        if current is not None and current.holds_for(keys, seq_lens, tokens):
            return current
        self.current = None  # from here on the device no longer holds the old plan
        self.current = self._decide(keys, observed, seq_lens, tokens)
        return self.current

    def _decide(
        self, keys: list[Key], observed: Observed, seq_lens: npt.NDArray[np.integer], tokens: int
    ) -> BatchDecision:
        requests = list(observed.requests)  # a copy: the host's own changes
        lens = np.array(seq_lens, dtype=np.int32)  # a copy: the host's own changes
        plan = refused(len(keys), self.settings, self.settings.max_batch) or self._plan(
            observed, requests, seq_lens
        )
        if isinstance(plan, str):
            return BatchDecision(keys, requests, lens, tokens, host_reason=plan)
        return BatchDecision(keys, requests, lens, tokens, *plan)

    def _plan(
        self, observed: Observed, requests: list[Any], seq_lens: npt.NDArray[np.integer]
    ) -> tuple[int, int] | str:
        """Plan a batch; what a decision keeps of the plan, or why the host decodes the batch."""
        began, compiled = time.perf_counter(), COMPILING.seconds
        forest = self.source.forest(observed.tree_cache, requests, seq_lens)
        check = self.cross_check
        wrong = None if check is None else check(forest, observed.table_rows)
        if wrong is not None:
            logger.error(
                "deft: DEFT_VERIFY: the radix tree and the page tables differ: %s. The host's "
                "kernel decodes this batch.", wrong,
            )  # fmt: skip
            return "cross-check failed"
        plan = self.planner.plan(forest)
        if self.loses is not None and self.loses(plan, forest):
            return "shares too little to be faster"
        seconds = time.perf_counter() - began - (COMPILING.seconds - compiled)
        self.state.plans += 1
        self.state.plan_seconds += seconds
        self.state.rids = [request.rid for request in requests]
        self.state.forest = forest
        loaded = plan.loaded_tokens(forest.seq_lens)
        logger.debug(
            "deft: planned %d requests, %d nodes, %d items in %.1f ms: loads %d of %d tokens",
            len(requests), forest.num_nodes, plan.num_items, seconds * 1e3, loaded,
            forest.tokens_attended,
        )  # fmt: skip
        return loaded, plan.num_open

"""Decide which verifications of chains of an MLA model share enough for a plan to gain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deft_backend.attention import LatentAttention
from deft_backend.hosts.common.latches import OnceLog
from deft_backend.hosts.common.latent import gains_too_little
from deft_backend.hosts.sglang.prefixes.prefix_source import CachedTree, Key, key_of
from deft_backend.hosts.sglang.step.decode_plan import BatchObserver, Observed

FAILED = "planning failed"


@dataclass(eq=False)
class LatentSharing:
    """Asks the radix tree and the costs, so nobody waits for the device.

    A batch keeps its decision until its composition changes: tokens that its requests generate are
    read once either way. Under a cache whose tree cannot be read, the host verifies all chains.
    """

    attention: LatentAttention
    observer: BatchObserver  # of verifications
    num_layers: int
    _tree: CachedTree = field(
        default_factory=lambda: CachedTree("the host verifies all chains", bigrams=True)
    )
    _log: OnceLog = field(default_factory=OnceLog)
    _keys: list[Key] | None = None
    _requests: list[Any] | None = None  # kept alive so that the ids in `_keys` stay unique
    _reason: str | None = None

    def too_little(self, forward_batch: Any) -> str | None:
        """Why the host's kernel verifies a batch, or None."""
        observed = self.observer.of(forward_batch)
        if observed is None:
            return "batch without requests"
        try:
            keys = [key_of(request) for request in observed.requests]
            if keys != self._keys:
                self._keys, self._requests = keys, list(observed.requests)
                self._reason = FAILED  # unless the decision succeeds
                self._reason = self._decide(observed)
        except Exception as error:
            self._log.batch_left(error)
            return FAILED
        return self._reason

    def _decide(self, observed: Observed) -> str | None:
        tokens = self.attention.query_tokens
        lens = np.array([request.seqlen + tokens for request in observed.requests])
        forest = self._tree.forest(observed.tree_cache, observed.requests, lens)
        if forest is None:
            return "unreadable prefix cache"
        return gains_too_little(self.attention, forest, self.num_layers)

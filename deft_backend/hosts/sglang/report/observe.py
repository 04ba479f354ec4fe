"""``DEFT_OBSERVE``: count the decode steps of a server that runs another attention backend.

This gives the baseline of ``deft ab``: the KV that the host's kernels read, query by query.
"""

import functools
import logging
from typing import Any

from deft_backend.hosts.sglang import versions
from deft_backend.hosts.sglang.report.server import start_reporting, state_of
from deft_backend.hosts.sglang.start.layers import division_of, full_cache
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState
from deft_patches.sglang import observe_batch

logger = logging.getLogger("deft_backend")


@functools.cache
def install() -> None:
    """Observe the model runners of this process from now on; a second call changes nothing."""
    missing = versions.missing()
    if missing is not None:
        logger.warning(
            "deft: DEFT_OBSERVE counts nothing: this SGLang lacks a member it needs (%s)", missing
        )
        return
    observe_batch.install(Observer().observe)


class Observer:
    """Counts decode steps and verifications, from the first one on."""

    def __init__(self) -> None:
        self._state: ServerState | None = None
        self._runner: Any = None

    def observe(self, forward_batch: Any, batch: Any, runner: Any) -> None:
        """Observer of ``ForwardBatch.init_new``."""
        mode = forward_batch.forward_mode
        if runner.is_draft_worker or not (mode.is_decode() or mode.is_target_verify()):
            return
        if self._runner is None:
            self._state, self._runner = _counting(runner), runner
        if self._state is not None and runner is self._runner:
            self._state.count_host("observed", _tokens_of(forward_batch, batch))


def _tokens_of(forward_batch: Any, batch: Any) -> int:
    """Tokens of a batch's requests together."""
    if forward_batch.seq_lens_sum is not None:
        return int(forward_batch.seq_lens_sum)
    if forward_batch.seq_lens_cpu is not None:
        return int(forward_batch.seq_lens_cpu.sum())
    # A speculating server prepares a batch before the CPU knows what the batch before accepted.
    # Only the device has these lengths. The requests have those of one verification ago.
    return sum(request.seqlen for request in batch.reqs)


def _counting(runner: Any) -> ServerState | None:
    """Counters of a server, which are reported from now on; None if no layer's reads are known."""
    division = division_of(runner)
    if not division.tree and not isinstance(full_cache(runner.token_to_kv_pool), str):
        # No kernel of ours runs these heads, but the host's do, and their bytes are known.
        division = division_of(runner, lambda shape: None)
    if not division.tree:
        reasons = "; ".join(dict.fromkeys(division.host.values()))
        logger.warning("deft: DEFT_OBSERVE counts nothing in this server (%s)", reasons)
        return None
    state = state_of(runner, division, str(runner.decode_attention_backend_str), "")
    start_reporting(state, runner, Settings.from_env())
    return state

"""The adapter's report on its server: one state file for each rank, as on every host."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from deft_backend.hosts.common.limits import Division
from deft_backend.hosts.vllm.cached_prefixes import CachedPrefixes
from deft_backend.hosts.vllm.layers import Layer
from deft_backend.hosts.vllm.plugin import port_of
from deft_backend.hosts.vllm.versions import VLLM, asked_name
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import DraftCounts
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.metrics import page_of_files
from deft_backend.telemetry.state import ServerState, report_counters
from deft_patches.vllm import observe_steps

logger = logging.getLogger("deft_backend")


class AcceptedDrafts:
    """Counts verified drafts and their accepted tokens, whichever kernel verified them. The
    scheduler's message of the next step, `late` messages later with asynchronous scheduling, lacks
    the rejected tokens. The last draft of a request has none and stays uncounted.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        # By request: tokens computed if the target accepts all drafts; then the draft tokens of
        # each step whose result is unknown, oldest first.
        self._open: dict[str, list[int]] = {}
        self._accepted = 0
        self._counts = DraftCounts(0, 0)  # one object, because another thread reads it

    def observe(self, message: Any) -> None:
        for request in message.finished_req_ids:
            self._open.pop(request, None)
        cached = message.scheduled_cached_reqs
        scheduled, drafted = message.num_scheduled_tokens, message.scheduled_spec_decode_tokens
        drafts, resumed = self._counts.drafts, cached.resumed_req_ids
        # Every step pays for this loop, so it looks up as little as it can.
        every, late, accepted = self._open, self._late, self._accepted
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            held = every.get(request)
            if held is None or (resumed and request in resumed):
                held = every[request] = [0]
            else:
                known = held.pop(1) if len(held) > late + 1 else 0
                drafts += known > 0
                accepted += known - (held[0] - computed)
            held[0] = computed + scheduled[request]
            held.append(len(drafted[request]) if request in drafted else 0)
        self._accepted = accepted
        # The scheduler may tell a rejection early: counts must not fall.
        self._counts = DraftCounts(drafts, max(self._counts.accepted, self._accepted))

    def read(self) -> DraftCounts:
        return self._counts


@dataclass
class Server:
    """This process's tree attention and counters; builders that a host makes twice get the same."""

    config: Any  # the server's configuration; another object means another server
    # Tree attention of each attention group, by the properties it was made for.
    groups: dict[Hashable, Any] = field(default_factory=dict)
    prefixes: CachedPrefixes | None = None  # what its requests share
    state: ServerState | None = None  # Counters, once there is a group
    drafts: AcceptedDrafts | None = None  # Counts accepted draft tokens, if the server speculates
    divided: str | None = None  # the last line about layers that vLLM's implementation decodes

    def log_division(self, division: Division[str, Layer]) -> None:
        line = division.text()
        if line is not None and line != self.divided:
            logger.log(logging.INFO if division.tree else logging.WARNING, "deft: %s", line)
        self.divided = line

    def counters_of(self, settings: Settings, dtype: torch.dtype, **layers: Any) -> ServerState:
        """The counters, made for these layers of the whole model, whose cache has this dtype."""
        if self.state is None:
            state = _state_of(self.config, settings, dtype, layers)
            self.drafts = _count_drafts(state, self.config)
            if untold(self.config) is None:
                state.serving = False
                observe_steps.install(self.observe)
            _start_reporting(state, self.config.parallel_config, settings)
            self.state = state
        return self.state

    def observe(self, message: Any) -> None:
        observe_steps.remove(self.observe)
        if self.state is not None:
            self.state.begin_serving()


_current: Server | None = None


def server_of(vllm_config: Any) -> Server:
    global _current
    if _current is None or _current.config is not vllm_config:
        if _current is not None:
            for observer in (_current, _current.drafts, _current.prefixes):
                if observer is not None:
                    observe_steps.remove(observer.observe)
        _current = Server(vllm_config)
    return _current


def _state_of(
    vllm_config: Any, settings: Settings, dtype: torch.dtype, layers: dict[str, Any]
) -> ServerState:
    from vllm.distributed import parallel_state

    try:
        rank = int(parallel_state.get_tensor_model_parallel_rank())
    except AssertionError:  # outside a server
        rank = 0
    return ServerState(
        port=port_of(sys.argv),
        rank=rank,
        host="vllm",
        host_version=VLLM.installed() or "unknown",
        backend=asked_name(vllm_config),
        policy=settings.policy,
        dtype=str(dtype).removeprefix("torch."),
        dtype_bytes=dtype.itemsize,
        **layers,
    )


def untold(vllm_config: Any) -> str | None:
    """Why this worker's observers see no message of the scheduler, in a few words; or None."""
    if vllm_config.parallel_config.distributed_executor_backend == "ray":
        return "workers under Ray get other messages"
    return observe_steps.missing()


def _count_drafts(state: ServerState, vllm_config: Any) -> AcceptedDrafts | None:
    if vllm_config.speculative_config is None:
        return None
    late = int(bool(vllm_config.scheduler_config.async_scheduling))
    reason = observe_steps.missing()
    if late and vllm_config.parallel_config.pipeline_parallel_size > 1:
        # Several steps of a request are then under way, and their number varies.
        reason = "pipeline stages with asynchronous scheduling"
    if reason is not None:
        logger.warning("deft: this server does not count accepted draft tokens: %s", reason)
        return None
    accepted = AcceptedDrafts(late)
    observe_steps.install(accepted.observe)
    state.read_drafts = accepted.read
    return accepted


def _start_reporting(state: ServerState, place: Any, settings: Settings) -> None:
    from vllm import envs

    stages = place.pipeline_parallel_size
    seconds = max(0.1, float(envs.VLLM_LOG_STATS_INTERVAL))
    report_counters(
        state,
        settings,
        pp_rank=place.rank // place.tensor_parallel_size % stages if stages > 1 else None,
        dp_rank=data_rank(place),
        log=DecodeLog(seconds=seconds) if state.rank == 0 else None,
        publishes=page_of_files(),  # otherwise the API server reads the state files: see plugin.py
    )


def data_rank(place: Any) -> int | None:
    """This engine's index among several, or None; vLLM leaves a dense model's engine no more."""
    if place.data_parallel_size > 1:
        return int(place.data_parallel_rank)
    return int(place.data_parallel_index) or None

"""The adapter's report on its server: one state file for each rank, as on every host."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from deft_backend.hosts.common.division import Division, LayerShape
from deft_backend.hosts.vllm.report.accepted import AcceptedDrafts
from deft_backend.hosts.vllm.report.command_line import port_of
from deft_backend.hosts.vllm.start.division import attending_layers
from deft_backend.hosts.vllm.start.layers import Layer
from deft_backend.hosts.vllm.versions import VLLM, asked_name
from deft_backend.settings.config import Settings
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.metrics import page_of_files
from deft_backend.telemetry.state import ServerState, report_counters
from deft_patches.vllm import observe_steps

logger = logging.getLogger("deft_backend")


class Counted(NamedTuple):
    """The layers whose steps the counters count."""

    names: tuple[str, ...]  # of the group's layers
    shape: LayerShape
    dtype: torch.dtype  # of their KV cache
    device: torch.device
    # Layers of the whole model with this shape and cache; 0 counts the layers with full attention,
    # or all if there are none.
    num_layers: int = 0
    observed: str | None = None  # the host's backend that runs them; None: tree attention
    values_apart: bool = True  # whether their cache holds values besides keys; not with MLA


@dataclass
class Server:
    """This process's tree attention and counters for its server.

    A host that profiles graphs makes its builders twice: both get the same workspace and counters.
    """

    config: Any  # the server's configuration; another object means another server
    # Tree attention of each attention group, by the properties it was made for.
    groups: dict[Hashable, Any] = field(default_factory=dict)
    prefixes: Any = None  # CachedPrefixes: what the requests of a short extend share
    state: ServerState | None = None  # Counters, once there is a group
    drafts: AcceptedDrafts | None = None  # Counts accepted draft tokens, if the server speculates
    counting: tuple[str, ...] = ()  # layers of the group that counts the server's steps
    divided: str | None = None  # the last line about layers that vLLM's implementation decodes

    def log_division(self, division: Division[str, Layer]) -> None:
        """Log which layers tree attention decodes, once for all groups of the server."""
        line = division.text()
        if line is not None and line != self.divided:
            logger.log(logging.INFO if division.tree else logging.WARNING, "deft: %s", line)
        self.divided = line

    def count_in(self, counted: Counted, settings: Settings) -> ServerState:
        """The counters; the first group that asks for them counts the steps."""
        if self.state is None:
            self.counting = counted.names
            state = _state_of(self.config, counted, settings)
            self.drafts = _count_drafts(state, self.config)
            if _tells_requests(self.config):
                state.serving = False
                observe_steps.install(self.observe)
            _start_reporting(state, self.config.parallel_config, settings)
            self.state = state
        return self.state

    def observe(self, message: Any) -> None:
        """Observer of the scheduler's messages: requests follow the host's start.

        Some hosts warm up with steps like those of requests, which have no message.
        """
        observe_steps.remove(self.observe)
        if self.state is not None:
            self.state.begin_serving()


_current: Server | None = None


def server_of(vllm_config: Any) -> Server:
    """The server of a configuration; this process forgets an earlier server."""
    global _current
    if _current is None or _current.config is not vllm_config:
        if _current is not None:
            for observer in (_current, _current.drafts, _current.prefixes):
                if observer is not None:
                    observe_steps.remove(observer.observe)
        _current = Server(vllm_config)
    return _current


def _state_of(vllm_config: Any, counted: Counted, settings: Settings) -> ServerState:
    """Counters for a server, at zero."""
    from vllm.distributed import parallel_state

    try:
        rank = int(parallel_state.get_tensor_model_parallel_rank())
    except AssertionError:  # outside a server
        rank = 0
    full = sum(1 for _ in attending_layers(vllm_config, full=True))
    every = sum(1 for _ in attending_layers(vllm_config, full=False))
    return ServerState(
        port=port_of(sys.argv),
        rank=rank,
        host="vllm",
        host_version=VLLM.installed() or "unknown",
        backend=counted.observed or asked_name(vllm_config),
        policy="" if counted.observed else settings.policy,
        device=counted.device.type,
        dtype=str(counted.dtype).removeprefix("torch."),
        num_layers=counted.num_layers or full or every,
        num_query_heads=counted.shape.num_query_heads,
        num_kv_heads=counted.shape.num_kv_heads,
        head_dim=counted.shape.head_dim,
        dtype_bytes=counted.dtype.itemsize,
        values_apart=counted.values_apart,
    )


def _tells_requests(vllm_config: Any) -> bool:
    """Whether the worker's observers see the first step of requests."""
    ray = vllm_config.parallel_config.distributed_executor_backend == "ray"
    return not ray and observe_steps.missing() is None


def _count_drafts(state: ServerState, vllm_config: Any) -> AcceptedDrafts | None:
    """Count the drafts of a server that speculates, from now on; None in other servers."""
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
    """Report the counters from now on, in the log at the rate of the host's own line."""
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
    """This engine's index among several; None for the only engine.

    vLLM tells each engine of a dense model that it is alone, and leaves it only its index. So the
    first of these looks like an only engine.
    """
    if place.data_parallel_size > 1:
        return int(place.data_parallel_rank)
    return int(place.data_parallel_index) or None

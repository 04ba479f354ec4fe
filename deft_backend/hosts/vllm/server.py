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
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.metrics import page_of_files
from deft_backend.telemetry.state import ServerState, report_counters
from deft_patches.vllm import left_graphs, observe_steps

logger = logging.getLogger("deft_backend")


@dataclass
class Server:
    """This process's tree attention and counters; builders that a host makes twice get the same."""

    config: Any  # the server's configuration; another object means another server
    # Tree attention of each attention group, by the properties it was made for.
    groups: dict[Hashable, Any] = field(default_factory=dict)
    prefixes: CachedPrefixes | None = None  # what its requests share
    state: ServerState | None = None  # Counters, once there is a group
    shares_graphs: bool = False  # whether graphs hold tree attention and the host's
    usual_graph: int | None = None  # tokens of the host's largest graph, before we asked for larger
    divided: str | None = None  # the last line about layers that vLLM's implementation decodes

    def log_division(self, division: Division[str, Layer]) -> None:
        line = division.text()
        if line is not None and line != self.divided:
            logger.log(logging.INFO if division.tree else logging.WARNING, "deft: %s", line)
        self.divided = line

    def counters_of(self, settings: Settings, dtype: torch.dtype, **layers: Any) -> ServerState:
        """The counters, made for these layers of the whole model, whose cache has this dtype."""
        from vllm.distributed import parallel_state

        if self.state is None:
            try:
                rank = int(parallel_state.get_tensor_model_parallel_rank())
            except AssertionError:  # outside a server
                rank = 0
            state = ServerState(
                port=port_of(sys.argv),
                rank=rank,
                host="vllm",
                host_version=VLLM.installed() or "unknown",
                backend=asked_name(self.config),
                policy=settings.policy,
                dtype=str(dtype).removeprefix("torch."),
                dtype_bytes=dtype.itemsize,
                **layers,
            )
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
            left_graphs.rules.clear()
            for observer in (_current, _current.prefixes):
                if observer is not None:
                    observe_steps.remove(observer.observe)
        _current = Server(vllm_config)
    return _current


def shares_graphs(vllm_config: Any) -> bool:
    """Of :class:`Server`. A drafter asks with a copy of the configuration, which is no server's."""
    return _current is not None and _current.config is vllm_config and _current.shares_graphs


def untold(vllm_config: Any) -> str | None:
    """Why this worker's observers see no message of the scheduler, in a few words; or None."""
    ray = vllm_config.parallel_config.distributed_executor_backend == "ray"
    return "workers under Ray get other messages" if ray else None


def _start_reporting(state: ServerState, place: Any, settings: Settings) -> None:
    from vllm import envs

    stages, engine = place.pipeline_parallel_size, place.data_parallel_rank
    if place.data_parallel_size == 1:  # vLLM leaves a dense model's engine no more
        engine = place.data_parallel_index or None
    seconds = max(0.1, float(envs.VLLM_LOG_STATS_INTERVAL))
    report_counters(
        state,
        settings,
        pp_rank=place.rank // place.tensor_parallel_size % stages if stages > 1 else None,
        dp_rank=engine,
        log=DecodeLog(seconds=seconds) if state.rank == 0 else None,
        publishes=page_of_files(),  # otherwise the API server reads the state files: see plugin.py
    )

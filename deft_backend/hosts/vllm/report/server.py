"""The adapter's report on its server: one state file for each rank, as on every host."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deft_backend.hosts.vllm.report.accepted import AcceptedDrafts
from deft_backend.hosts.vllm.report.port import port_of
from deft_backend.hosts.vllm.start.division import Division, divide_layers, unsupported_kind
from deft_backend.hosts.vllm.start.layers import LayerShape
from deft_backend.hosts.vllm.start.speculation import drafts
from deft_backend.hosts.vllm.versions import VLLM, asked_name
from deft_backend.settings.config import Settings
from deft_backend.telemetry import reporting
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.metrics import page_of_files
from deft_backend.telemetry.state import ServerState
from deft_patches.vllm import observe_steps

logger = logging.getLogger("deft_backend")


@dataclass
class Server:
    """This process's tree attention and counters for its server.

    The host may build its metadata builders twice, because it profiles graphs first. Both times it
    must get the same workspace and the same counters.

    Attributes
    ----------
    config : VllmConfig
        The server's configuration; another object means another server.
    groups : dict
        Tree attention of each attention group, by the properties it was made for.
    state : ServerState, optional
        Counters, once there is a group.
    drafts : AcceptedDrafts, optional
        Counts accepted draft tokens, if the server speculates.
    counting : tuple of str
        Layers of the group that counts the server's steps.
    divided : str, optional
        The last line about layers that vLLM's implementation decodes.
    """

    config: Any
    groups: dict[Hashable, Any] = field(default_factory=dict)
    state: ServerState | None = None
    drafts: AcceptedDrafts | None = None
    counting: tuple[str, ...] = ()
    divided: str | None = None

    def say(self, division: Division) -> None:
        """Log which layers tree attention decodes, once for all groups of the server."""
        line = division.text()
        if line is not None and line != self.divided:
            logger.log(logging.INFO if division.tree else logging.WARNING, "deft: %s", line)
        self.divided = line

    def count_in(
        self,
        layer_names: Sequence[str],
        shape: LayerShape,
        dtype: torch.dtype,
        device: torch.device,
        settings: Settings,
        observed: str | None = None,
    ) -> ServerState:
        """The counters; the first group that asks for them counts the steps.

        `observed` names the host's backend to count; None counts the steps of tree attention.
        """
        if self.state is None:
            self.counting = tuple(layer_names)
            backend = observed or asked_name(self.config)
            policy = "" if observed else settings.policy
            kv_dtype = None if dtype == self.config.model_config.dtype else dtype
            found = divide_layers(self.config).layers_with(shape, kv_dtype)
            layers = found or _num_layers(self.config)
            state = _state_of(self.config, shape, layers, dtype, device, backend, policy)
            self.drafts = _count_drafts(state, self.config)
            _start_reporting(state, self.config.parallel_config, settings)
            self.state = state
        return self.state


_current: Server | None = None


def server_of(vllm_config: Any) -> Server:
    """The server of a configuration; this process forgets an earlier server."""
    global _current
    if _current is None or _current.config is not vllm_config:
        if _current is not None and _current.drafts is not None:
            observe_steps.remove(_current.drafts.observe)
        _current = Server(vllm_config)
    return _current


def _state_of(
    vllm_config: Any,
    shape: LayerShape,
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    policy: str,
) -> ServerState:
    """Counters for a server, at zero. They count `layers` layers with full attention."""
    return ServerState(
        port=port_of(sys.argv),
        rank=_tensor_rank(),
        host="vllm",
        host_version=VLLM.installed() or "unknown",
        backend=backend,
        policy=policy,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=layers,
        num_query_heads=shape.num_query_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=dtype.itemsize,
    )


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
        logger.warning("deft: accepted draft tokens are not counted (%s)", reason)
        return None
    accepted = AcceptedDrafts(late)
    observe_steps.install(accepted.observe)
    state.read_drafts = accepted.read
    return accepted


def _start_reporting(state: ServerState, place: Any, settings: Settings) -> None:
    """Report the counters from now on, in the log at the rate of the host's own line."""
    stages = place.pipeline_parallel_size
    reporting.start(
        state,
        settings,
        pp_rank=place.rank // place.tensor_parallel_size % stages if stages > 1 else None,
        dp_rank=data_rank(place),
        log=DecodeLog(seconds=_log_interval()) if state.rank == 0 else None,
        publishes=page_of_files(),  # otherwise the API server reads the state files: see plugin.py
    )


def data_rank(place: Any) -> int | None:
    """This engine's index among several; None for the only engine.

    vLLM tells each engine of a dense model that it is alone, and leaves it only its index. So the
    first of several engines looks like an only engine; the others do not.
    """
    if place.data_parallel_size > 1:
        return int(place.data_parallel_rank)
    return int(place.data_parallel_index) or None


def _log_interval() -> float:
    from vllm import envs

    return max(0.1, float(envs.VLLM_LOG_STATS_INTERVAL))


def _tensor_rank() -> int:
    from vllm.distributed import parallel_state

    try:
        return int(parallel_state.get_tensor_model_parallel_rank())
    except AssertionError:  # outside a server
        return 0


def full_layers(vllm_config: Any) -> list[str]:
    """Names of the target's layers with full attention, whichever backend runs them."""
    return [
        name
        for name, module in vllm_config.compilation_config.static_forward_context.items()
        if getattr(module, "impl", None) is not None
        and not drafts(name, vllm_config)
        and unsupported_kind(module, vllm_config) is None
    ]


def _num_layers(vllm_config: Any) -> int:
    """Layers that a server of the host's backend counts: those with full attention, else all."""
    context = vllm_config.compilation_config.static_forward_context
    attending = sum(
        getattr(module, "impl", None) is not None and not drafts(name, vllm_config)
        for name, module in context.items()
    )
    return len(full_layers(vllm_config)) or attending

"""Read a model runner's server for the counters, in the form that all hosts use."""

from __future__ import annotations

from typing import Any

from deft_backend.hosts.common.division import Division, LayerShape
from deft_backend.hosts.sglang.start.layers import planned_shape
from deft_backend.hosts.sglang.versions import SGLANG, ranks, resolved
from deft_backend.settings.config import Settings
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.state import ServerState, report_counters


def state_of(
    runner: Any, division: Division[int, LayerShape], backend: str, policy: str,
    *, values_apart: bool = True,
) -> ServerState:  # fmt: skip
    """Counters for a model runner, at zero.

    They count the layers that tree attention can decode. Layers with windows or with a recurrent
    state read other amounts, so the counters leave them out.
    """
    heads, kv_heads, dim = planned_shape(division) or (0, 0, 0)
    dtype = runner.kv_cache_dtype
    return ServerState(
        port=runner.server_args.port, rank=int(ranks(runner).tp_rank), host="sglang",
        host_version=SGLANG.installed() or "unknown", backend=backend, policy=policy,
        device=str(runner.device), dtype=str(dtype).removeprefix("torch."),
        num_layers=len(division.tree), num_query_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, dtype_bytes=int(dtype.itemsize), values_apart=values_apart,
    )  # fmt: skip


def start_reporting(state: ServerState, runner: Any, settings: Settings) -> None:
    """Report the counters from now on; the log line follows the host's own decode line."""
    args, place = resolved(runner.server_args), ranks(runner)
    report_counters(
        state, settings,
        pp_rank=place.pp_rank if getattr(args, "pp_size", 1) > 1 else None,
        dp_rank=(place.dp_rank or 0) if getattr(args, "dp_size", 1) > 1 else None,
        log=DecodeLog(steps=max(1, args.decode_log_interval)) if place.attn_tp_rank == 0 else None,
        publishes=args.enable_metrics,
    )  # fmt: skip

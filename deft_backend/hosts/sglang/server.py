"""Read a model runner's server for the counters, in the form that all hosts use."""

from __future__ import annotations

from typing import Any

from deft_backend.config import Settings
from deft_backend.hosts.sglang.versions import SGLANG, attention_ranks, ranks, resolved
from deft_backend.telemetry import reporting
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.state import ServerState


def shape_of(runner: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension on this rank."""
    keys = runner.token_to_kv_pool.get_key_buffer(runner.token_to_kv_pool.start_layer)
    heads = runner.model_config.num_attention_heads // attention_ranks()
    return heads, int(keys.shape[-2]), int(keys.shape[-1])


def state_of(runner: Any, backend: str, policy: str) -> ServerState:
    """Counters for a model runner, at zero."""
    heads, kv_heads, dim = shape_of(runner)
    return ServerState(
        port=runner.server_args.port,
        rank=int(ranks(runner).tp_rank),
        host="sglang",
        host_version=SGLANG.installed() or "unknown",
        backend=backend,
        policy=policy,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        num_layers=int(runner.token_to_kv_pool.layer_num),
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype_bytes=int(runner.kv_cache_dtype.itemsize),
    )


def start_reporting(state: ServerState, runner: Any, settings: Settings) -> None:
    """Report the counters from now on; the log line follows the host's own decode line."""
    args, place = resolved(runner.server_args), ranks(runner)
    reporting.start(
        state,
        settings,
        pp_rank=place.pp_rank if getattr(args, "pp_size", 1) > 1 else None,
        dp_rank=(place.dp_rank or 0) if getattr(args, "dp_size", 1) > 1 else None,
        log=DecodeLog(steps=max(1, args.decode_log_interval)) if place.attn_tp_rank == 0 else None,
        publishes=args.enable_metrics,
    )

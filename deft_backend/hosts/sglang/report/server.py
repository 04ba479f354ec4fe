"""Read a model runner's server for the counters, in the form that all hosts use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.sglang.start.caches import full_cache
from deft_backend.hosts.sglang.start.layers import Division, Shape, divide_layers
from deft_backend.hosts.sglang.versions import (
    SGLANG,
    attention_layers,
    attention_ranks,
    ranks,
    resolved,
)
from deft_backend.settings.config import Settings
from deft_backend.telemetry import reporting
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.state import ServerState


def division_of(runner: Any, refused: Callable[[Shape], str | None] | None = None) -> Division:
    """Which layers of a model runner tree attention can decode.

    If the model shows no attention layers, the cache decides for all layers alike. `refused` says
    why no kernel runs a shape; default: what the kernels say.
    """
    pool, device = runner.token_to_kv_pool, device_of(runner)
    refused = refused or (lambda shape: TreeAttention.unsupported(*shape, runner.dtype, device))
    cache = full_cache(pool)
    layers = attention_layers(runner.model)
    if not isinstance(cache, str) and layers:
        others = getattr(runner.req_to_token_pool, "mamba_map", ())
        return divide_layers(layers, cache, others, refused)
    keys = pool.get_key_buffer(pool.start_layer)
    heads = runner.model_config.num_attention_heads // attention_ranks()
    shape = (heads, int(keys.shape[-2]), int(keys.shape[-1]))
    ids, reason = range(int(pool.layer_num)), refused(shape)
    if reason is not None:
        return Division(None, (), dict.fromkeys(ids, reason))
    return Division(shape, tuple(ids), {})


def device_of(runner: Any) -> torch.device:
    """The device that a model runner decodes on."""
    if runner.device == "cuda":
        return torch.device("cuda", runner.gpu_id)
    return torch.device(runner.device)


def state_of(runner: Any, division: Division, backend: str, policy: str) -> ServerState:
    """Counters for a model runner, at zero.

    They count the layers that tree attention can decode. Layers with windows or with a recurrent
    state read other amounts, so the counters leave them out.
    """
    heads, kv_heads, dim = division.shape or (0, 0, 0)
    return ServerState(
        port=runner.server_args.port,
        rank=int(ranks(runner).tp_rank),
        host="sglang",
        host_version=SGLANG.installed() or "unknown",
        backend=backend,
        policy=policy,
        device=str(runner.device),
        dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        num_layers=len(division.tree),
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

"""What the adapter reports about its server: its description and its counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deft_backend.hosts.common.limits import Division, LayerShape
from deft_backend.hosts.sglang.arguments import NAME
from deft_backend.hosts.sglang.versions import SGLANG, ranks, resolved
from deft_backend.settings.config import Settings
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.state import ServerState, report_counters
from deft_patches.sglang import observe_batch


def state_of(
    runner: Any,
    division: Division[int, LayerShape],
    policy: str,
    *,
    short_tokens: int = 0,
    values_apart: bool = True,
) -> ServerState:
    shape = next(iter(division.tree.values()))
    dtype = runner.kv_cache_dtype
    return ServerState(
        port=runner.server_args.port,
        rank=int(ranks(runner).tp_rank),
        host="sglang",
        host_version=SGLANG.installed() or "unknown",
        backend=NAME,
        policy=policy,
        short_tokens=short_tokens,
        device=str(runner.device),
        dtype=str(dtype).removeprefix("torch."),
        num_layers=len(division.tree),
        **shape._asdict(),
        dtype_bytes=int(dtype.itemsize),
        values_apart=values_apart,
    )


def start_reporting(state: ServerState, runner: Any, settings: Settings) -> None:
    """Report the counters from now on; the log line follows the host's own decode line."""
    args, place = resolved(runner.server_args), ranks(runner)
    report_counters(
        state,
        settings,
        pp_rank=place.pp_rank if getattr(args, "pp_size", 1) > 1 else None,
        dp_rank=(place.dp_rank or 0) if getattr(args, "dp_size", 1) > 1 else None,
        log=DecodeLog(steps=max(1, args.decode_log_interval)) if place.attn_tp_rank == 0 else None,
        publishes=args.enable_metrics,
    )


WARM_UP_TEXT, WARM_UP_IDS = "The capital city of France is", [10, 11, 12]
"""Prompts of the request that the host sends itself when it starts; ids without a tokenizer."""

_LONGEST = 64  # tokens of that text, with a tokenizer of bytes and its special tokens


def leave_out_warm_up(state: ServerState, runner: Any) -> Callable[[], object]:
    """Count from the first request on that is no warm-up of the host; returns what undoes it."""
    state.serving = False

    def observe(forward_batch: Any, batch: Any, observed: Any) -> None:
        if observed is runner and not all(map(_warms_up, batch.reqs)):
            undo()
            state.begin_serving()

    undo = observe_batch.install(observe)
    return undo


def _warms_up(request: Any) -> bool:
    ids, tokenizer = list(request.origin_input_ids[:_LONGEST]), request.tokenizer
    if tokenizer is None or len(ids) == _LONGEST:
        return ids == WARM_UP_IDS
    return bool(tokenizer.decode(ids, skip_special_tokens=True).strip() == WARM_UP_TEXT)

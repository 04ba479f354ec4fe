"""Check and then time MLA over a plan and the host's decode, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.latent.latent_case import SCALE, LatentCase, LatentInputs, hosts_kernel
from deft_backend.attention import LatentAttention
from deft_backend.attention.reference_attention import relative_error
from deft_backend.shapes import gains_nothing
from deft_backend.tools.tuning.measure import captured, launch_us

TREES = (
    (64, 16384, 256),
    (32, 65536, 256),
    (128, 4096, 256),
    (20, 63936, 4096),
    (16, 4096, 256),
    (64, 1024, 256),
    (32, 0, 2048),
)
"""Requests, shared tokens and own tokens: those of the first measurement, and two more."""

HEADS = ((8, 1), (16, 1), (32, 1), (8, 4), (64, 1))
"""Heads of a rank and query tokens."""

Peer = Callable[[LatentInputs], Callable[[], torch.Tensor]]
"""Prepares a kernel of others for a case; the time is not counted."""

TOLERANCE = 1.6e-2
"""Relative error above which a result in bfloat16 is wrong."""


class WrongResult(RuntimeError):
    """A method's result differs from float64."""


def cases(page_size: int) -> list[LatentCase]:
    """Every tree with every number of heads."""
    return [LatentCase(*tree, *heads, page_size) for tree in TREES for heads in HEADS]


def measure(
    chosen: Sequence[LatentCase], device: torch.device, rep_ms: int, peers: Mapping[str, Peer]
) -> Iterator[dict[str, Any]]:
    """A row for each case: ``us`` of the host's decode, of peers and of ours, in CUDA graphs.

    ``deft`` is one layer. ``plan`` and ``lay_out`` run once a step, for all layers.

    Raises
    ------
    WrongResult
        If a result differs from float64.
    """
    _, kernel, decode = hosts_kernel()
    for case in chosen:
        inputs = LatentInputs(case, device)
        want = inputs.reference()
        call = inputs.host_call()
        us: dict[str, float] = {}
        error: dict[str, float] = {}
        us["host"], error["host"] = _timed(partial(decode, call), want, rep_ms, "host", case)
        for name, prepare in peers.items():
            us[name], error[name] = _timed(prepare(inputs), want, rep_ms, name, case)
        reason = gains_nothing(case.heads, case.query_tokens)
        if reason is None:
            attention = LatentAttention(
                num_query_heads=case.heads,
                dtype=torch.bfloat16,
                device=device,
                kernel=kernel,
                page_size=case.page_size,
                max_batch=case.requests,
                query_tokens=case.query_tokens,
            )
            for name, launch in (("plan", _planned), ("lay_out", _laid_out)):
                replay, _ = captured(partial(launch, attention, inputs))
                us[name] = launch_us(replay, rep_ms)
            layer = partial(attention.run, *inputs.attended, sm_scale=SCALE)
            us["deft"], error["deft"] = _timed(layer, want, rep_ms, "deft", case)
        yield {
            **asdict(case),
            "us": {name: round(value, 2) for name, value in us.items()},
            "error": {name: round(value, 5) for name, value in error.items()},
            **({} if reason is None else {"refused": reason}),
        }


def _planned(attention: LatentAttention, inputs: LatentInputs) -> torch.Tensor:
    attention.plan_batch(inputs.page_table, inputs.seq_lens, on_device=True)
    return inputs.seq_lens


def _laid_out(attention: LatentAttention, inputs: LatentInputs) -> torch.Tensor:
    attention.lay_out(inputs.seq_lens)
    return inputs.seq_lens


def _timed(
    launch: Callable[[], torch.Tensor], want: torch.Tensor, rep_ms: int, name: str, case: LatentCase
) -> tuple[float, float]:
    """Microseconds, and the relative error of a result that a replay wrote over NaN."""
    replay, out = captured(launch)
    out.fill_(float("nan"))
    replay()
    error = relative_error(out, want)
    if not error < TOLERANCE:
        raise WrongResult(f"{name} differs from float64 by {error:g} in {case}")
    return launch_us(replay, rep_ms), error

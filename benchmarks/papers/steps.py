"""A decode step's parts: products with weights, attention, and what a step would take without it.

DeFT's Figure 4 and Tables 5 and 8 compare steps of whole models. Here a step is the sum of its
measured parts: each layer's products with weights, each layer's attention under a method, and the
output layer. Weights are random; no time depends on their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from deft_backend.tools.tuning.measure import captured, launch_us


class Shape(NamedTuple):
    """A model's sizes."""

    layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    vocabulary: int

    @property
    def heads(self) -> str:
        return f"{self.query_heads}/{self.kv_heads}"


MODELS: Mapping[str, Shape] = {
    "Llama-3-8B": Shape(32, 4096, 14336, 32, 8, 128256),
    "CodeLlama-7B": Shape(32, 4096, 11008, 32, 32, 32016),
    "CodeLlama-34B": Shape(48, 8192, 22016, 64, 8, 32016),
}
HEAD_DIM = 128


def dense_us(shape: Shape, batch: int, dtype: torch.dtype, rep_ms: int) -> tuple[float, float]:
    """Microseconds of a layer without its attention, and of the output layer."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        made = torch.randn(rows, columns, device="cuda", dtype=dtype)
        return made.div_(columns**0.5)

    x = torch.randn(batch, shape.hidden, device="cuda", dtype=dtype)
    wide = shape.query_heads * HEAD_DIM
    qkv = weight(wide + 2 * shape.kv_heads * HEAD_DIM, shape.hidden)
    out, scale = weight(shape.hidden, wide), torch.ones(shape.hidden, device="cuda", dtype=dtype)
    gate, up = weight(shape.inner, shape.hidden), weight(shape.inner, shape.hidden)
    down, head = weight(shape.hidden, shape.inner), weight(shape.vocabulary, shape.hidden)

    def layer() -> Any:
        given = F.linear(F.rms_norm(x, (shape.hidden,), scale), qkv)
        y = x + F.linear(given[:, :wide], out)
        h = F.rms_norm(y, (shape.hidden,), scale)
        return y + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    def output() -> Any:
        return F.linear(F.rms_norm(x, (shape.hidden,), scale), head)

    def timed(launch: Callable[[], Any]) -> float:
        return launch_us(captured(launch)[0], rep_ms)

    with torch.inference_mode():
        return timed(layer), timed(output)


def step_row(
    model: str, row: Mapping[str, Any], layer_us: float, output_us: float, baseline: str
) -> dict[str, Any]:
    """A step's milliseconds under each method; `row` holds the attention of one layer in "us"."""
    shape = MODELS[model]
    dense = shape.layers * layer_us + output_us
    attention = {name: shape.layers * us for name, us in row["us"].items() if us is not None}
    step = {name: (dense + us) / 1e3 for name, us in attention.items()}
    slowest = step.get(baseline)
    return {
        "model": model,
        "workload": row["workload"],
        "heads": row["heads"],
        "batch": row["batch"],
        "without_attention_ms": round(dense / 1e3, 3),
        "step_ms": {name: round(ms, 3) for name, ms in step.items()},
        "attention_to_rest": {name: round(us / dense, 3) for name, us in attention.items()},
        "speedup": {name: round(slowest / ms, 3) for name, ms in step.items()} if slowest else {},
        "speedup_limit": round(slowest / dense * 1e3, 3) if slowest else None,
    }

"""What the kernels are compiled for before the first step, or before a capture."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.kernel_cache import ranks_cache
from deft_backend.hosts.common.warm_up import Drafts, LayerKind, StepTensors, warm_up_attention
from deft_backend.hosts.sglang.start.layers import full_cache
from deft_backend.hosts.sglang.versions import (
    attention_layers,
    draft_tokens,
    drafts_trees,
    sinks_of_layers,
)
from deft_backend.settings.config import Settings


def step_tensors(runner: Any, layers: Collection[int]) -> StepTensors:
    """The tensors of a step: their kinds are the same in graphs and in eager steps."""
    cache, table = full_cache(runner.token_to_kv_pool), runner.req_to_token_pool.req_to_token
    assert not isinstance(cache, str)
    return StepTensors(
        cache.keys, cache.values, [table.shape[1]], table_dtype=table.dtype, drafts=_drafts(runner),
        layers=_kinds(runner.model, layers),
    )  # fmt: skip


def _drafts(runner: Any) -> Drafts | None:
    """What a model runner verifies, in every step."""
    tokens = draft_tokens(runner.server_args)
    if tokens == 1:
        return None
    return Drafts(tokens, trees=drafts_trees(runner.server_args), always=True)


def _kinds(model: Any, layers: Collection[int]) -> list[LayerKind]:
    """Each kind of some layers, as the model shows them."""
    sinks = sinks_of_layers(model)
    kinds = {
        LayerKind(bool(layer.logit_cap), getattr(sinks.get(layer.layer_id), "dtype", None))
        for layer in attention_layers(model)
        if layer.layer_id in layers
    }
    return sorted(kinds or {LayerKind()}, key=str)


def compiler_of(
    attention: TreeAttention, runner: Any, settings: Settings, layers: Collection[int]
) -> Callable[[torch.dtype, torch.dtype], None] | None:
    """Compiles for table rows and lengths of other dtypes; None where nothing is compiled."""
    if attention.device.type != "cuda":
        return None
    known = step_tensors(runner, layers)
    done = {(known.rows_dtype, known.lens_dtype)}

    def compile_for(rows: torch.dtype, lens: torch.dtype) -> None:
        if (rows, lens) in done:
            return
        done.add((rows, lens))
        with ranks_cache(settings, attention.device) as shared:
            warm_up_attention(
                attention, replace(known, rows_dtype=rows, lens_dtype=lens), on_device=True,
                smallest=settings.min_batch, shared=shared,
            )  # fmt: skip

    return compile_for

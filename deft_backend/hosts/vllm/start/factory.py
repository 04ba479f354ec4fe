"""Build tree attention for an attention group, or log why the host's own runs instead."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch

from deft_backend.attention import TreeAttention
from deft_backend.forest import warm_up
from deft_backend.hosts.common.kernel_cache import take_compiled_kernels
from deft_backend.hosts.common.limits import refused_cache
from deft_backend.hosts.common.planner_choice import (
    VLLM,
    capability_of,
    planned_on_device,
    selects_device_planner,
)
from deft_backend.hosts.common.warm_up import Drafts, LayerKind, StepTensors, warm_up_attention
from deft_backend.hosts.vllm.report.server import server_of
from deft_backend.hosts.vllm.start.division import divide_layers
from deft_backend.hosts.vllm.start.layers import Layer, LayerShape
from deft_backend.hosts.vllm.start.say import say_once
from deft_backend.hosts.vllm.start.sleep import can_sleep, outside_memory_pools
from deft_backend.hosts.vllm.start.speculation import (
    drafts,
    query_tokens_of,
    unsupported_speculation,
)
from deft_backend.hosts.vllm.step.group import GroupAttention
from deft_backend.hosts.vllm.versions import blank_cache, unknown_cache
from deft_backend.settings.config import LOG_LEVELS, Settings, warn_unknown
from deft_backend.settings.policy_names import AUTO

logger = logging.getLogger("deft_backend")


def create_group(
    host: Any, spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
) -> GroupAttention | None:
    """Tree attention for the layers of a metadata builder; or None, with the reason in the log.

    Parameters
    ----------
    host : type[AttentionBackend]
        The host's backend that tree attention surrounds.
    spec : KVCacheSpec
        Cache specification of the builder's layers, with the block size that kernels see.
    layer_names : list of str
    vllm_config : VllmConfig
    device : torch.device

    Raises
    ------
    SettingsError
        If a ``DEFT_*`` variable has a value that is not allowed.
    """
    settings = Settings.from_env()
    logger.setLevel(LOG_LEVELS[settings.log])
    warn_unknown()
    try:
        group = _create(host, spec, layer_names, vllm_config, device, settings)
    except Exception as error:
        logger.debug("deft: set-up failed", exc_info=True)
        group = f"tree attention could not be set up ({error!r})"
    if not isinstance(group, str):
        return group
    say_once(f"{group}; these layers run through {host.get_name()} alone")
    return None


def _create(
    host: Any,
    spec: Any,
    layer_names: list[str],
    vllm_config: Any,
    device: torch.device,
    settings: Settings,
) -> GroupAttention | str | None:
    reason = unsupported_server(vllm_config)
    if reason is not None:
        return reason
    if all(drafts(name, vllm_config) for name in layer_names):
        return "the draft model gets no tree attention"
    division = divide_layers(vllm_config)
    server = server_of(vllm_config)
    server.say(division)
    mine = {name: division.tree[name] for name in layer_names if name in division.tree}
    taken = list(mine.values())
    if not taken:
        return None  # the line above gives the reasons
    reason = unsupported_spec(spec)
    if reason is not None:
        return reason
    shape = Counter(layer.shape for layer in taken).most_common(1)[0][0]
    dtype = vllm_config.model_config.dtype
    layer = taken[0]  # one specification, one kind of cache
    kv_dtype = layer.kv_dtype
    reason = _unsupported_shape(shape, spec, dtype, layer, device, settings)
    if reason is not None:
        return reason
    # Everything in a specification that the group depends on. The rest is checked already, or
    # concerns only the host.
    key = (tuple(layer_names), spec.block_size, device)
    if key in server.groups:
        return cast(GroupAttention, server.groups[key])
    largest = min(settings.max_batch, vllm_config.scheduler_config.max_num_seqs)
    query_tokens = query_tokens_of(vllm_config)
    plans_on_device = selects_device_planner(settings, VLLM, capability_of(device))
    if plans_on_device:
        largest = planned_on_device(largest, query_tokens, shape.gqa_group)

    def set_up() -> TreeAttention:
        attention = TreeAttention(
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            page_size=spec.block_size,
            max_batch=largest,
            query_tokens=query_tokens,
            policy=settings.policy,
        )
        if plans_on_device:
            take_compiled_kernels(settings, device)
            kinds = _kinds(attention, shape, mine, vllm_config)
            _warm_up(attention, host, vllm_config, len(layer_names), kinds, settings)
        else:
            warm_up()
        return attention

    sleeps = can_sleep(vllm_config)
    attention = outside_memory_pools(set_up, device) if sleeps else set_up()
    state = server.count_in(layer_names, shape, kv_dtype or dtype, device, settings)
    group = GroupAttention(
        attention,
        settings,
        state,
        tree_layers=division.layers_with(shape, kv_dtype),
        counts=not server.groups,  # the first one
        plans_on_device=plans_on_device,
        shows_batch=not sleeps,
    )
    server.groups[key] = group
    logger.info(
        "deft: %s of %d layers goes through tree attention (policy %s, block size %d, "
        "workspace %.1f MiB); everything else through %s",
        "decode" if query_tokens == 1 else f"verification of up to {query_tokens} tokens",
        len(taken), settings.policy, spec.block_size, attention.workspace_bytes / 2**20,
        host.get_name(),
    )  # fmt: skip
    return group


def unsupported_server(vllm_config: Any) -> str | None:
    """The feature of a server that rules out tree attention, in one line; or None."""
    from vllm import envs

    parallel = vllm_config.parallel_config
    if envs.VLLM_BATCH_INVARIANT:
        return "a plan depends on the batch: batch-invariant mode is not supported"
    if vllm_config.speculative_config is not None:
        reason = unsupported_speculation(vllm_config)
        if reason is not None:
            return reason
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name.replace('_', ' ').removesuffix(' size')} is not supported"
    if getattr(vllm_config.model_config, "rswa_window", None) is not None:
        return "reference sliding window attention is not supported"
    if getattr(parallel, "use_ubatching", False):
        return "decoding in micro-batches (dual batch overlap) is not supported"
    return None


def unsupported_spec(spec: Any) -> str | None:
    """Why the KV cache of a group's full-attention layers rules out tree attention; or None.

    The windows in it are those of other layers: every layer has been asked for its own.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if type(spec) is not FullAttentionSpec:  # its subclasses are other kinds of caches
        return f"a KV cache of kind {type(spec).__name__} is not supported"
    unknown = unknown_cache(spec)
    return None if unknown is None else f"a KV cache with {unknown} is not supported"


def _unsupported_shape(
    shape: LayerShape, spec: Any, dtype: torch.dtype, layer: Layer, device: torch.device,
    settings: Settings,
) -> str | None:  # fmt: skip
    if layer.kv_dtype is not None:
        reason = refused_cache(layer.cache)
        if reason is not None:
            return reason
    elif spec.dtype != dtype:
        return f"KV in {spec.dtype} under a model in {dtype} is not supported"
    if (shape.num_kv_heads, shape.head_dim) != (spec.num_kv_heads, spec.head_size):
        return f"{shape} over a KV cache of {spec.num_kv_heads} heads of {spec.head_size}"
    if device.type == "cuda" and settings.policy != AUTO:
        return f"DEFT_POLICY={settings.policy} is not supported: a GPU plans by itself, with auto"
    reason = TreeAttention.unsupported(*shape, dtype, device, kv_dtype=layer.kv_dtype)
    return None if reason is None else f"not supported: {reason}"


def _kinds(
    attention: TreeAttention, shape: LayerShape, layers: Mapping[str, Layer], vllm_config: Any
) -> list[LayerKind]:
    """Each kind of the layers of these that run through an attention, as their kernels see it."""
    modules = vllm_config.compilation_config.static_forward_context
    kinds = set()
    for name, layer in layers.items():
        if layer.shape == shape and (layer.kv_dtype or attention.dtype) == attention.kv_dtype:
            sinks = modules[name].impl.sinks.dtype if layer.sinks else None
            kinds.add(LayerKind(layer.logit_cap > 0.0, sinks))
    return sorted(kinds, key=str)


def _warm_up(
    attention: TreeAttention, host: Any, vllm_config: Any, num_layers: int,
    kinds: list[LayerKind], settings: Settings,
) -> None:  # fmt: skip
    """Compile planner and kernels for the tensors that the host's steps pass."""
    from deft_backend.hosts.vllm.start.layout import kv_views

    shape = (2, attention.num_kv_heads, attention.page_size, 2 * attention.head_dim)
    cache = blank_cache(host, vllm_config, shape, num_layers, attention.kv_dtype, attention.device)
    columns = -(-vllm_config.model_config.max_model_len // attention.page_size)
    # vLLM may make the block table wider, to a multiple of some number of blocks.
    tensors = StepTensors(
        *kv_views(cache, attention.head_dim), sorted({columns, -(-columns // 16) * 16}),
        rows_dtype=torch.int32, lens_dtype=torch.int32,
        drafts=Drafts(attention.query_tokens, ragged=True) if attention.query_tokens > 1 else None,
        layers=kinds,
    )  # fmt: skip
    warm_up_attention(attention, tensors, on_device=True, smallest=settings.min_batch)

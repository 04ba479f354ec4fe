"""Build tree attention for an attention group, or log why the host's own runs instead."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from vllm import envs

from deft_backend.attention import LatentAttention, TreeAttention
from deft_backend.hosts.common.latches import OnceLog
from deft_backend.hosts.common.limits import (
    LayerShape,
    Unsupported,
    for_any_batch,
    other_policy,
    planned_on_device,
    refuse_if,
)
from deft_backend.hosts.common.warm_up import Drafts, LayerKind, StepTensors, prepare_kernels
from deft_backend.hosts.vllm.cached_prefixes import CachedPrefixes
from deft_backend.hosts.vllm.group import GroupAttention, TreeGroup
from deft_backend.hosts.vllm.latent import (
    LatentGroup,
    LatentSharing,
    capture_both,
    latent_attention,
)
from deft_backend.hosts.vllm.layers import Layer, divide_layers, drafts, kv_views, query_tokens_of
from deft_backend.hosts.vllm.server import server_of, untold
from deft_backend.hosts.vllm.versions import blank_cache, unknown_cache
from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import LOG_LEVELS, Settings, warn_unknown
from deft_patches.vllm import observe_steps

logger = logging.getLogger("deft_backend")

T = TypeVar("T")

log = OnceLog()


class LayerGroup(NamedTuple):
    host: Any  # the class of the host's backend that tree attention surrounds
    spec: Any  # of the layers' caches, with the block size that kernels see
    layer_names: list[str]
    vllm_config: Any
    device: torch.device


def create_group(layers: LayerGroup) -> GroupAttention | None:
    settings = for_any_batch(Settings.from_env(), equal_bits=envs.VLLM_BATCH_INVARIANT)
    logger.setLevel(LOG_LEVELS[settings.log])
    warn_unknown()
    group = None
    try:
        group = build(layers, settings)
    except Exception as error:
        reason = str(error)
        if not isinstance(error, Unsupported):
            reason = f"tree attention could not be set up ({error!r})"
            logger.debug("deft: set-up failed", exc_info=True)
        if reason:
            log.warn(f"{reason}; these layers run through {layers.host.get_name()} alone")
    if layers.host.is_mla():
        latent = group if isinstance(group, LatentGroup) else None
        differ = capture_both(latent, layers.vllm_config, settings)
        if differ is not None and group is not None:
            log.warn(f"{differ}; these layers run through {layers.host.get_name()} alone")
            return None
    return group


def build(layers: LayerGroup, settings: Settings) -> GroupAttention:
    """Tree attention for a group; raises Unsupported, without a message if it is logged."""
    host, spec, layer_names, vllm_config, device = layers
    refuse_if(unsupported_server(vllm_config))
    if all(drafts(name, vllm_config) for name in layer_names):
        raise Unsupported("the draft model gets no tree attention")
    division = divide_layers(vllm_config)
    server = server_of(vllm_config)
    server.log_division(division)
    mine = {name: division.tree[name] for name in layer_names if name in division.tree}
    if not mine:
        raise Unsupported  # the line above gives the reasons
    shape = Counter(layer.shape for layer in mine.values()).most_common(1)[0][0]
    layer = next(iter(mine.values()))  # one specification, one kind of cache
    refuse_if(unsupported_spec(spec, latent=layer.value_dim is not None))
    refuse_if(_unsupported_shape(layers, shape, layer))
    query_tokens = query_tokens_of(vllm_config)
    key = (tuple(layer_names), spec.block_size, device)
    if key in server.groups:
        held: GroupAttention = server.groups[key]
        return held
    largest = min(settings.max_batch, vllm_config.scheduler_config.max_num_seqs)
    alike = sum((of.shape, of.kv_dtype) == (shape, layer.kv_dtype) for of in division.tree.values())
    if device.type == "cuda":
        largest = planned_on_device(largest, query_tokens, shape.gqa_group)
    dtype = vllm_config.model_config.dtype
    kv_dtype = layer.kv_dtype or dtype

    def set_up() -> TreeAttention | LatentAttention:
        if layer.value_dim is not None:
            return latent_attention(
                layer, vllm_config, device, settings, page_size=spec.block_size, max_batch=largest
            )
        attention = TreeAttention(
            **shape._asdict(),
            dtype=dtype,
            kv_dtype=layer.kv_dtype,
            device=device,
            page_size=spec.block_size,
            max_batch=largest,
            max_tokens=_columns(layers, spec.block_size)[-1] * spec.block_size,
            query_tokens=query_tokens,
            policy=settings.policy,
        )
        tensors = _step_tensors(attention, layers, _kinds(attention, mine, vllm_config))
        prepare_kernels(attention, tensors, settings)
        return attention

    sleeps = can_sleep(vllm_config)
    attention = outside_memory_pools(set_up, device) if sleeps else set_up()
    counters = server.counters_of(
        settings,
        kv_dtype,
        **shape._asdict(),
        device=device.type,
        num_layers=alike,
        values_apart=layer.value_dim is None,
        short_tokens=getattr(attention, "short_tokens", 0),
    )
    made: Callable[..., GroupAttention]
    if isinstance(attention, LatentAttention):
        if server.prefixes is not None:
            raise Unsupported("MLA in several KV cache groups is not supported")
        sharing = LatentSharing(attention, alike, vllm_config.cache_config.block_size)
        server.prefixes = sharing
        made = partial(LatentGroup, attention, sharing=sharing)
        observe_steps.install(sharing.observe)
    else:
        server.prefixes = server.prefixes or known_prefixes(vllm_config, query_tokens)
        made = partial(TreeGroup, attention, prefixes=server.prefixes)
    group = made(
        settings,
        counters,
        tree_layers=alike,
        counts=not server.groups,  # the first one
        shape=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        columns=_columns(layers, spec.block_size)[-1],
        shows_batch=not sleeps,
        equal_bits=envs.VLLM_BATCH_INVARIANT,
    )
    server.groups[key] = group
    logger.info(
        "deft: %s of %d layers goes through tree attention (policy %s, block size %d, "
        "workspace %.1f MiB); everything else through %s",
        "decode" if query_tokens == 1 else f"verification of up to {query_tokens} tokens",
        len(mine),
        getattr(attention, "policy", settings.policy),
        spec.block_size,
        attention.workspace_bytes / 2**20,
        host.get_name(),
    )
    return group


def known_prefixes(vllm_config: Any, query_tokens: int) -> CachedPrefixes | None:
    """What the server's requests share; None, with a log line, if this worker is not told."""
    reason = untold(vllm_config)
    if reason is not None:
        log.warn(f"steps with prefills are the host's alone: {reason}")
        return None
    prefixes = CachedPrefixes(vllm_config.cache_config.block_size, query_tokens)
    observe_steps.install(prefixes.observe)
    return prefixes


def unsupported_server(vllm_config: Any) -> str | None:
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    reason = depends_on_the_batch(vllm_config) if envs.VLLM_BATCH_INVARIANT else None
    if reason is not None:
        return reason
    if getattr(speculative, "enable_adaptive_verification", False):
        return "adaptive verification is not supported: only the device knows a request's tokens"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            return f"{name.replace('_', ' ').removesuffix(' size')} is not supported"
    if vllm_config.model_config.rswa_window is not None:
        return "reference sliding window attention is not supported"
    if parallel.use_ubatching:
        return "decoding in micro-batches (dual batch overlap) is not supported"
    return None


def depends_on_the_batch(vllm_config: Any) -> str | None:
    """Why a request's bits would depend on other requests in vLLM's batch-invariant mode."""
    settings, most = Settings.from_env(), vllm_config.scheduler_config.max_num_seqs
    if vllm_config.speculative_config is not None:
        return "batch-invariant mode with drafts is not supported: a verified token has other bits"
    held = min(settings.max_batch, largest_batch())
    if most > held:
        return (
            f"batch-invariant mode needs plans for all of the server's {most} requests, and they "
            f"hold {held}: give --max-num-seqs {held}"
        )
    return other_policy(settings, "batch-invariant mode")


def unsupported_spec(spec: Any, *, latent: bool = False) -> str | None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    # Subclasses are other kinds of caches.
    if type(spec) is not (MLAAttentionSpec if latent else FullAttentionSpec):
        return f"a KV cache of kind {type(spec).__name__} is not supported"
    unknown = unknown_cache(spec)
    return None if unknown is None else f"a KV cache with {unknown} is not supported"


def _unsupported_shape(layers: LayerGroup, shape: LayerShape, layer: Layer) -> str | None:
    spec, device, dtype = layers.spec, layers.device, layers.vllm_config.model_config.dtype
    if layer.kv_dtype is None and spec.dtype != dtype:
        return f"KV in {spec.dtype} under a model in {dtype} is not supported"
    if (shape.num_kv_heads, shape.head_dim) != (spec.num_kv_heads, spec.head_size):
        return f"{shape} over a KV cache of {spec.num_kv_heads} heads of {spec.head_size}"
    if layer.value_dim is not None:
        return None
    reason = TreeAttention.unsupported(*shape, dtype, device, kv_dtype=layer.kv_dtype)
    return None if reason is None else f"not supported: {reason}"


def _kinds(
    attention: TreeAttention, layers: Mapping[str, Layer], vllm_config: Any
) -> list[LayerKind]:
    shape = (attention.num_query_heads, attention.num_kv_heads, attention.head_dim)
    modules = vllm_config.compilation_config.static_forward_context
    kinds = set()
    for name, layer in layers.items():
        if layer.shape == shape and (layer.kv_dtype or attention.dtype) == attention.kv_dtype:
            sinks = modules[name].impl.sinks.dtype if layer.sinks else None
            kinds.add(LayerKind(layer.logit_cap > 0.0, sinks))
    return sorted(kinds, key=str)


def _step_tensors(
    attention: TreeAttention, layers: LayerGroup, kinds: list[LayerKind]
) -> StepTensors:
    shape = (2, attention.num_kv_heads, attention.page_size, 2 * attention.head_dim)
    kind, alike = (attention.kv_dtype, attention.device), len(layers.layer_names)
    cache = blank_cache(layers.host, layers.vllm_config, shape, alike, *kind)
    caches, columns = kv_views(cache, attention.head_dim), _columns(layers, attention.page_size)
    drafts = Drafts(attention.query_tokens, ragged=True) if attention.query_tokens > 1 else None
    return StepTensors(*caches, columns, drafts=drafts, layers=kinds, integers=torch.int32)


def _columns(layers: LayerGroup, block_size: int) -> list[int]:
    """Columns that a block table may have: vLLM may round them up to a multiple of 16."""
    columns = -(-layers.vllm_config.model_config.max_model_len // block_size)
    return sorted({columns, -(-columns // 16) * 16})


# Sleep mode. A server that can sleep unmaps the memory pools of its KV cache, and of everything it
# makes with the cache. Captured graphs hold the addresses of our plan and workspace, so both must
# lie elsewhere.


def can_sleep(vllm_config: Any) -> bool:
    """Whether a server may unmap its memory, by sleep mode or only by its allocator."""
    model = vllm_config.model_config
    return bool(model.enable_sleep_mode or model.enable_cumem_allocator)


def outside_memory_pools(make: Callable[[], T], device: torch.device) -> T:
    """Run `make` in a thread of its own: ``use_mem_pool`` redirects only its caller's thread."""

    def run() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="deft-set-up") as thread:
        return thread.submit(run).result()

"""Build the backend for a model runner, or log why the host's own backend runs instead."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.eager_steps import has_one_way
from deft_backend.hosts.common.limits import (
    Unsupported,
    for_any_batch,
    planned_on_device,
    refuse_if,
    same_on_all_ranks,
)
from deft_backend.hosts.common.warm_up import Drafts, LayerKind, StepTensors, prepare_kernels
from deft_backend.hosts.sglang import versions
from deft_backend.hosts.sglang.backend import OWN_STATE, surround
from deft_backend.hosts.sglang.latent import (
    LatentLayers,
    LatentSharing,
    is_latent,
    latent_attention,
)
from deft_backend.hosts.sglang.layers import (
    device_of,
    divided,
    full_cache,
    ignored_scales,
    model_asks,
    unsupported_model,
)
from deft_backend.hosts.sglang.mixed import EagerSharing, MixedSteps
from deft_backend.hosts.sglang.prefixes import BatchObserver
from deft_backend.hosts.sglang.report import leave_out_warm_up, start_reporting, state_of
from deft_backend.hosts.sglang.step_inputs import Verification
from deft_backend.hosts.sglang.steps import TreeSteps
from deft_backend.hosts.sglang.tree_layers import StepLayers, TreeLayers
from deft_backend.settings.config import LOG_LEVELS, Settings, warn_unknown
from deft_patches.sglang import observe_batch, page_table_fence, tree_graphs

logger = logging.getLogger("deft_backend")


def wrap_backend(runner: Any, name: str, host: Any) -> Any:
    """Put tree attention around `host`, named `name`, or return it and log the reason. If one rank
    fails, or ranks differ, every rank undoes it: with different sets of graphs they would wait for
    each other forever during the capture.
    """
    if runner.is_draft_worker:
        return host
    with ExitStack() as undo:
        made = None
        try:
            settings = for_any_batch(
                Settings.from_env(), equal_bits=versions.deterministic(runner.server_args)
            )
            logger.setLevel(LOG_LEVELS[settings.log])
            warn_unknown()
            refuse_if(ignored_scales(runner, name))
            made = _create(runner, host, settings, undo)
        except Unsupported as error:
            reason = str(error)
        except Exception as error:
            reason = f"tree attention could not be set up ({error!r})"
            logger.debug("deft: set-up failed", exc_info=True)
        try:
            mine = None if made is None else _decided(made.deft, settings)
            agreed = same_on_all_ranks(versions.tensor_parallel_group(runner), mine)
            if agreed is False:
                reason = (
                    "its ranks would decode in different ways (DEFT_POLICY, DEFT_MIN_BATCH or "
                    "DEFT_MAX_BATCH differ, or their GPUs do)"
                )
            elif made is not None:
                reason = "another rank has no tree attention"
        except Exception as error:
            agreed, reason = False, f"its ranks cannot agree on tree attention ({error!r})"
        if not agreed:
            logger.warning(
                "deft: %s; all attention runs through the host's own backend (%s)", reason, name
            )
            return host
        assert made is not None
        undo.pop_all()  # the backend stays
    layers = made.deft.layers
    start_reporting(layers.state, runner, settings)
    tokens = layers.attention.query_tokens
    logger.info(
        "deft: %s goes through tree attention (policy %s, workspace %.1f MiB); everything else%s "
        "through %s",
        "decode" if tokens == 1 else f"verification of {tokens} tokens a request",
        getattr(layers.attention, "policy", settings.policy),
        layers.attention.workspace_bytes / 2**20,
        "" if made.deft.sharing is None else ", and batches that share too little,",
        name,
    )
    division = layers.division.text()
    if division is not None:
        logger.info("deft: %s", division)
    return made


def _decided(steps: TreeSteps, settings: Settings) -> tuple[object, ...]:
    layers = steps.layers
    return (
        steps.sharing is None,
        layers.attention.capacity.max_batch,
        str(getattr(layers.attention, "policy", settings.policy)),
        settings.min_batch,
        tuple(layers.division.tree),
    )


def _create(runner: Any, host: Any, settings: Settings, undo: ExitStack) -> Any:
    make = _latent_layers if is_latent(runner) else _tree_layers
    # The host makes no larger batch than it has rows.
    largest = min(settings.max_batch, runner.req_to_token_pool.size)
    layers = make(runner, host, settings, largest)
    steps = _steps(runner, layers, settings, undo)
    undo.callback(vars(host).pop, OWN_STATE, None)
    return surround(host, steps)


def _tree_layers(runner: Any, host: Any, settings: Settings, largest: int) -> StepLayers:
    refuse_if(unsupported_model(runner))
    division, shape = divided(runner)
    query_tokens = versions.draft_tokens(runner.server_args)
    planned = planned_on_device(largest, query_tokens, shape.gqa_group)
    rows = runner.req_to_token_pool.size
    if versions.deterministic(runner.server_args) and planned < rows:
        raise Unsupported(
            f"deterministic inference needs plans for all of the server's {rows} requests, and "
            f"they hold {planned}: give --max-running-requests {planned}"
        )
    attention = TreeAttention(
        **shape._asdict(),
        dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype,
        device=device_of(runner),
        max_batch=planned,
        max_tokens=runner.req_to_token_pool.req_to_token.shape[1],
        query_tokens=query_tokens,
        policy=settings.policy,
    )
    if attention.device.type == "cuda":
        tensors = _step_tensors(runner, division.tree)
        prepare_kernels(attention, tensors, settings)
    short_tokens = attention.short_tokens
    state = state_of(runner, division, settings.policy, short_tokens=short_tokens)
    asks = model_asks(runner)
    return TreeLayers(host, attention, state, division, model_asks=asks, verify=settings.verify)


def _latent_layers(runner: Any, host: Any, settings: Settings, largest: int) -> StepLayers:
    tokens = versions.draft_tokens(runner.server_args)
    refuse_if(versions.SGLANG.leaves_mla(settings, str(runner.device)))
    largest = planned_on_device(largest, tokens)
    attention, division = latent_attention(runner, largest, tokens, settings)
    state = state_of(runner, division, settings.policy, values_apart=False)
    asks = model_asks(runner)
    return LatentLayers(host, attention, state, division, model_asks=asks, verify=settings.verify)


def _steps(runner: Any, layers: StepLayers, settings: Settings, undo: ExitStack) -> TreeSteps:
    attention, verification, latent = layers.attention, None, isinstance(layers, LatentLayers)
    _ = attention.counters  # fail here, not in the first step
    if not getattr(versions.resolved(runner.server_args), "skip_server_warmup", False):
        undo.callback(leave_out_warm_up(layers.state, runner))
    if attention.query_tokens > 1:
        verification = Verification(attention.query_tokens, attention.max_batch, attention.device)
    steps = TreeSteps(
        layers,
        settings,
        verification=verification,
        # The thread that shows batches must not read a sleeping server's memory.
        shows=not getattr(versions.resolved(runner.server_args), "enable_memory_saver", False),
        decodes=not latent or verification is None,
    )
    has_graphs = versions.decode_graphs(runner.server_args) != "disabled"
    observer = BatchObserver(runner)
    eager = EagerSharing(layers, observer)
    if isinstance(attention, TreeAttention) and attention.device.type == "cuda":
        eager.costs = attention.target.costs
        steps.eager = None if has_one_way(settings) else eager
    if isinstance(layers, LatentLayers):  # its kernels are compiled before the check at start
        steps.sharing = LatentSharing(layers.attention, observer, len(layers.division.tree))
        if has_graphs:
            # If set-up fails later, the host's backend runs alone. With a second set of its graphs,
            # some backends would prepare the buffers of the newest graph only.
            undo.callback(tree_graphs.install(runner, steps))
    if getattr(versions.resolved(runner.server_args), "enable_mixed_chunk", False):
        steps.mixed = MixedSteps(layers, settings, eager, unsplit=_unsplit(runner, layers))
    if steps.eager or steps.sharing or steps.mixed:
        undo.callback(observe_batch.install(observer.observe))
    if has_graphs and versions.read_end() is None:  # the host never asks when tables were read
        undo.callback(page_table_fence.install(runner, steps.reads_during_forward))
    return steps


def _unsplit(runner: Any, layers: StepLayers) -> str | None:
    """Why the host computes every step that decodes and prefills whole; the log says so."""
    prefill, decode = versions.backend_names(runner.server_args)
    unsplit = None
    if not isinstance(layers, TreeLayers):
        unsplit = "MLA prefills through other layers"
    elif layers.attention.query_tokens > 1:
        unsplit = "the server verifies drafts"
    elif layers.division.host or layers.model_asks:
        unsplit = "some layers read the host's metadata of whole batches"
    elif prefill != decode:
        unsplit = f"prefills go to another backend ({prefill})"
    elif versions.decodes_per_rank(runner.server_args):
        unsplit = "DP attention pads batches"
    if unsplit is not None:
        logger.info("deft: the host's kernel decodes in steps that also prefill: %s", unsplit)
    return unsplit


def _step_tensors(runner: Any, layers: Collection[int]) -> StepTensors:
    cache, table = full_cache(runner.token_to_kv_pool), runner.req_to_token_pool.req_to_token
    assert not isinstance(cache, str)
    sinks = versions.sinks_of_layers(runner.model)
    tokens, drafts = versions.draft_tokens(runner.server_args), None
    kinds = {
        LayerKind(bool(layer.logit_cap), getattr(sinks.get(layer.layer_id), "dtype", None))
        for layer in versions.attention_layers(runner.model)
        if layer.layer_id in layers
    }
    if tokens > 1:
        drafts = Drafts(tokens, trees=versions.drafts_trees(runner.server_args), always=True)
    return StepTensors(
        cache.keys,
        cache.values,
        [table.shape[1]],
        table_dtype=table.dtype,
        drafts=drafts,
        layers=sorted(kinds or {LayerKind()}, key=str),
    )

"""Build the backend for a model runner, or log why the host's own backend runs instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from deft_backend.attention import TreeAttention
from deft_backend.forest import PrefixForest
from deft_backend.hosts.common.limits import MLA_IS_OFF, Unsupported, refuse_if
from deft_backend.hosts.common.planner_choice import (
    SGLANG_ADAPTER,
    capability_of,
    planned_on_device,
    selects_device_planner,
    untried,
)
from deft_backend.hosts.common.ranks import same_on_all_ranks
from deft_backend.hosts.common.self_check import prepare_kernels
from deft_backend.hosts.common.short_extends import ShortExtends
from deft_backend.hosts.common.warm_up import warm_up_host_planner
from deft_backend.hosts.sglang.prefixes.page_table import disagreement
from deft_backend.hosts.sglang.prefixes.prefix_source import PrefixSource
from deft_backend.hosts.sglang.report.accepted import AcceptedDrafts
from deft_backend.hosts.sglang.report.server import start_reporting, state_of
from deft_backend.hosts.sglang.start.arguments import NAME
from deft_backend.hosts.sglang.start.latent import is_latent, latent_attention
from deft_backend.hosts.sglang.start.layers import (
    device_of,
    divided,
    ignored_scales,
    model_asks,
    unsupported_model,
)
from deft_backend.hosts.sglang.start.warm_up import compiler_of, step_tensors
from deft_backend.hosts.sglang.step.backend import OWN_STATE, Steps, surround
from deft_backend.hosts.sglang.step.decode_plan import BatchObserver, DecodePlanner
from deft_backend.hosts.sglang.step.device_planned import DevicePlannedSteps
from deft_backend.hosts.sglang.step.extends import ExtendSteps
from deft_backend.hosts.sglang.step.host_planned import HostPlannedSteps
from deft_backend.hosts.sglang.step.kinds import Verification
from deft_backend.hosts.sglang.step.latent_layers import LatentLayers
from deft_backend.hosts.sglang.step.latent_sharing import LatentSharing
from deft_backend.hosts.sglang.step.tree_layers import TreeLayers
from deft_backend.hosts.sglang.versions import (
    decode_graphs,
    decodes_per_rank,
    draft_tokens,
    read_end,
    resolved,
    tensor_parallel_group,
)
from deft_backend.planner import Plan
from deft_backend.settings.config import LOG_LEVELS, Settings, warn_unknown
from deft_backend.settings.policy_names import AUTO
from deft_patches.sglang import observe_batch, page_table_fence, tree_graphs

logger = logging.getLogger("deft_backend")


def wrap_backend(runner: Any, name: str, host: Any) -> Any:
    """Put tree attention around the host's backend, or return that backend and log the reason.

    If set-up fails on one rank, or ranks decided differently, every rank undoes it. Ranks with
    different sets of graphs would wait for each other forever during the capture.

    - `runner`: the host's model runner.
    - `name`: the host's name for its backend.
    - `host`: That backend.
    """
    if runner.is_draft_worker:
        return host
    with ExitStack() as undo:
        made = None
        try:
            settings = Settings.from_env()
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
            agreed = same_on_all_ranks(tensor_parallel_group(runner), mine)
            if agreed is False:
                reason = (
                    "its ranks would decode in different ways (DEFT_PLANNER, DEFT_POLICY, "
                    "DEFT_MIN_* or DEFT_MAX_BATCH differ, or their GPUs do)"
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
    layers, on_device = made.deft.layers, isinstance(made.deft, DevicePlannedSteps)
    takes_all = on_device and made.deft.sharing is None
    start_reporting(layers.state, runner, settings)
    tokens = layers.attention.query_tokens
    logger.info(
        "deft: %s goes through tree attention (policy %s, planned on the %s, workspace %.1f "
        "MiB); everything else%s through %s",
        "decode" if tokens == 1 else f"verification of {tokens} tokens a request", settings.policy,
        "device" if on_device else "host", layers.attention.workspace_bytes / 2**20,
        "" if takes_all else ", and batches that share too little,", name,
    )  # fmt: skip
    division = layers.division.text()
    if division is not None:
        logger.info("deft: %s", division)
    return made


def _decided(steps: Steps, settings: Settings) -> tuple[object, ...]:
    """What decides the sets of graphs and the steps of tree attention: equal on all ranks."""
    return (
        type(steps).__name__, steps.layers.attention.capacity.max_batch, settings.policy,
        settings.min_batch, tuple(steps.layers.division.tree),
    )  # fmt: skip


def _create(runner: Any, host: Any, settings: Settings, undo: ExitStack) -> Any:
    """Build the backend; `undo` takes back its changes to the host."""
    make = _latent_steps if is_latent(runner) else _steps
    # The host makes no larger batch than it has rows.
    largest = min(settings.max_batch, runner.req_to_token_pool.size)
    steps = make(runner, host, settings, undo, largest)
    undo.callback(vars(host).pop, OWN_STATE, None)
    return surround(host, steps)


def _steps(runner: Any, host: Any, settings: Settings, undo: ExitStack, largest: int) -> Steps:
    """The steps of a model whose layers have keys and values."""
    refuse_if(unsupported_model(runner))
    division, (heads, kv_heads, dim) = divided(runner)
    query_tokens, capability = draft_tokens(runner.server_args), capability_of(device_of(runner))
    on_device = selects_device_planner(
        settings, SGLANG_ADAPTER, capability, verifies=query_tokens > 1
    )
    refuse_if(untried(settings, capability, query_tokens))
    if not on_device and decodes_per_rank(runner.server_args):
        # Each rank would choose between its two sets of graphs by its own requests. But graphs hold
        # collectives, so all ranks must replay the same set.
        raise Unsupported(
            "DP attention is not supported with the host planner; DEFT_PLANNER=device selects the "
            "device planner"
        )
    if on_device:
        largest = planned_on_device(largest, query_tokens, heads // kv_heads)
    attention = TreeAttention(
        num_query_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype, device=device_of(runner), max_batch=largest,
        query_tokens=query_tokens, policy=settings.policy,
    )  # fmt: skip
    if attention.device.type == "cuda":
        tensors = step_tensors(runner, division.tree)
        prepare_kernels(attention, tensors, settings, on_device=on_device)
    elif not on_device:
        warm_up_host_planner(attention)
    state = state_of(runner, division, NAME, settings.policy)
    layers = TreeLayers(host, attention, state, division, model_asks=model_asks(runner))
    make = _device_planned if on_device else _host_planned
    steps: Steps = make(runner, layers, settings, undo)
    steps.extends = _extends(runner, layers, settings, undo)
    return steps


def _latent_steps(
    runner: Any, host: Any, settings: Settings, undo: ExitStack, largest: int
) -> Steps:
    """The steps of an MLA model.

    The CPU plans decode, because it must know which batches share enough: the host's own graphs
    decode all others. The device plans every verification.
    """
    if not settings.mla:
        raise Unsupported(MLA_IS_OFF)
    tokens = draft_tokens(runner.server_args)
    if settings.policy != AUTO or (settings.planner == "device" and tokens == 1):
        raise Unsupported(
            "MLA takes plans of the policy auto, and host plans in decode; unset DEFT_POLICY and "
            "DEFT_PLANNER"
        )
    if tokens > 1:
        selects_device_planner(
            settings, SGLANG_ADAPTER, capability_of(device_of(runner)), verifies=True
        )
        largest = planned_on_device(largest, tokens)
    attention, division = latent_attention(runner, largest, tokens, settings)
    state = state_of(runner, division, NAME, settings.policy, values_apart=False)
    layers = LatentLayers(host, attention, state, division, model_asks=model_asks(runner))
    if tokens > 1:
        return _device_planned(runner, layers, settings, undo, latent=True)
    priced = attention.device.type == "cuda"  # the costs are a GPU's
    loses = partial(attention.loses, num_layers=len(division.tree)) if priced else None
    return _host_planned(runner, layers, settings, undo, loses)


def _device_planned(
    runner: Any, layers: TreeLayers, settings: Settings, undo: ExitStack, *, latent: bool = False
) -> DevicePlannedSteps:
    attention, verification = layers.attention, None
    _ = attention.device_planner  # fail here, not in the first step
    if attention.query_tokens > 1:
        drafts = AcceptedDrafts(runner)
        undo.callback(observe_batch.install(drafts.observe))
        layers.state.read_drafts = drafts.read
        verification = Verification(attention.query_tokens, attention.max_batch, attention.device)
    steps = DevicePlannedSteps(
        layers, settings, verification=verification,
        # The thread that shows batches must not read a sleeping server's memory.
        shows=not getattr(resolved(runner.server_args), "enable_memory_saver", False),
        # MLA's kernels are compiled before the check at start.
        compile_for=None
        if latent
        else compiler_of(attention, runner, settings, layers.division.tree),
        decodes=not latent,
    )  # fmt: skip
    if latent:
        observer = BatchObserver(runner, verifies=True)
        undo.callback(observe_batch.install(observer.observe))
        planned: Any = attention
        steps.sharing = LatentSharing(planned, observer, len(layers.division.tree))
        if _has_graphs(runner):
            undo.callback(tree_graphs.install(runner, steps))
    _install_fence(runner, steps, undo)
    return steps


def _host_planned(
    runner: Any, layers: TreeLayers, settings: Settings, undo: ExitStack,
    loses: Callable[[Plan, PrefixForest], bool] | None = None,
) -> HostPlannedSteps:  # fmt: skip
    attention, page_table = layers.attention, layers.page_table
    planner = DecodePlanner(
        attention, PrefixSource(page_table), settings, layers.state,
        partial(disagreement, page_table=page_table) if settings.verify else None,
        loses=loses,
    )  # fmt: skip
    observer = BatchObserver(runner)
    steps = HostPlannedSteps(layers, planner, observer)
    undo.callback(observe_batch.install(observer.observe))
    _install_fence(runner, steps, undo)
    if _has_graphs(runner):
        # If set-up fails later, the host's backend runs alone. With a second set of its graphs,
        # some backends would prepare the buffers of the newest graph only.
        undo.callback(tree_graphs.install(runner, steps))
    return steps


def _extends(
    runner: Any, layers: TreeLayers, settings: Settings, undo: ExitStack
) -> ExtendSteps | None:
    """Short extends; None where the host computes all prefills.

    ``DEFT_VERIFY`` checks no plan of the device planner, so with it there are none.
    """
    attention = layers.attention
    cached = not getattr(resolved(runner.server_args), "disable_radix_cache", False)
    if not cached or settings.verify:
        return None
    rule = ShortExtends.beside(attention, settings, len(layers.division.tree))
    if rule is None:
        return None
    if attention.device.type == "cuda":
        rule.warm_up(step_tensors(runner, layers.division.tree))
    extends = ExtendSteps(rule, layers, runner)
    undo.callback(observe_batch.install(extends.observe))
    return extends


def _install_fence(runner: Any, steps: Steps, undo: ExitStack) -> None:
    """Delay page-table writes during graphs with tree attention, if the host does not ask."""
    if read_end() is None and _has_graphs(runner):
        undo.callback(page_table_fence.install(runner, steps.replayed_tree))


def _has_graphs(runner: Any) -> bool:
    return decode_graphs(runner.server_args) != "disabled"

"""``DEFT_DRAFT=tree``: tree attention around the backends of the draft model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.kernel_cache import take_compiled_kernels
from deft_backend.hosts.common.planner_choice import planned_on_device
from deft_backend.hosts.sglang.drafts.draft_extension import DraftExtension, ExtensionTokens
from deft_backend.hosts.sglang.drafts.draft_steps import DraftStep, DraftSteps
from deft_backend.hosts.sglang.report.server import device_of, state_of
from deft_backend.hosts.sglang.start.arguments import NAME
from deft_backend.hosts.sglang.start.layers import Division
from deft_backend.hosts.sglang.start.model_checks import (
    Unsupported,
    divided,
    ignored_scales,
    model_asks,
    unsupported_model,
)
from deft_backend.hosts.sglang.start.warm_up import compiler_of, warm_up
from deft_backend.hosts.sglang.versions import (
    decode_graphs,
    decodes_per_rank,
    draft_tokens,
    extension_graphs_ask,
    read_end,
    resolved,
)
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState
from deft_patches.sglang import draft_backends
from deft_patches.sglang.draft_backends import Around

logger = logging.getLogger("deft_backend")


class _Parts(NamedTuple):
    """What a draft model's passes share: they never run at the same time."""

    attention: TreeAttention
    state: ServerState
    division: Division
    compile_for: Callable[[torch.dtype, torch.dtype], None] | None


def surround_draft_model(settings: Settings, name: str) -> None:
    """Surround the backends that the host will make for a draft model, if the settings ask for it.

    A rank that cannot do it leaves them to the host. Ranks may differ in this: their steps and
    graphs are the same.

    Parameters
    ----------
    settings : Settings
    name : str
        The host's name for its backend.
    """
    if settings.draft == "host":
        draft_backends.remove()
        logger.info("deft: the draft model's attention runs through %s", name)
        return
    parts = functools.cache(functools.partial(_create, settings=settings, name=name))

    @_or_host("decode steps", name)
    def around_steps(runner: Any, topk: int, container: Any) -> Any:
        if topk != 1:
            reason = f"a draft has {topk} branches, and 1 is supported"
            logger.warning("deft: the draft model's decode steps run through %s: %s", name, reason)
            return container
        made = parts(runner)
        if made is None:
            return container
        asks = model_asks(runner)
        steps = [
            DraftStep(each, made.attention, made.state, model_asks=asks)
            for each in container.attn_backends
        ]
        for step in steps:
            step.leave_layers(made.division.host)
        return DraftSteps(
            container, steps, made.attention, runner.req_to_token_pool.req_to_token, settings,
            made.compile_for,
        )  # fmt: skip

    @_or_host("draft extensions", name)
    def around_extension(runner: Any, topk: int, backend: Any) -> Any:
        if decode_graphs(runner.server_args) != "disabled" and not extension_graphs_ask():
            # The scheduler would write page tables while such a graph reads them.
            logger.warning(
                "deft: draft extensions run through %s: their graphs need SGLang 0.5.22 or newer",
                name,
            )  # fmt: skip
            return backend
        made = parts(runner)
        if made is None:
            return backend
        extension = DraftExtension(
            backend, made.attention, made.state, settings, shows=False,
            model_asks=model_asks(runner), compile_for=made.compile_for,
            verification=ExtensionTokens(made.attention.query_tokens),
        )  # fmt: skip
        extension.leave_layers(made.division.host)
        return extension

    draft_backends.install(around_steps, around_extension)


def _or_host(what: str, name: str) -> Callable[[Around], Around]:
    """Leave the host's backend as it is, with a line in the log, where surrounding it fails."""

    def guarded(around: Around) -> Around:
        def call(runner: Any, topk: int, backend: Any) -> Any:
            try:
                return around(runner, topk, backend)
            except Exception as error:
                logger.warning(
                    "deft: the draft model's %s run through %s: tree attention could not be set "
                    "up (%r)", what, name, error,
                )  # fmt: skip
                return backend

        return call

    return guarded


def _create(runner: Any, *, settings: Settings, name: str) -> _Parts | None:
    """Tree attention for a draft model; None, with a line in the log, if it cannot be had."""
    try:
        reason = _unsupported(runner, name)
        if reason is not None:
            raise Unsupported(reason)
        made = _parts(runner, settings)
    except Unsupported as error:
        reason = str(error)
    except Exception as error:
        reason = f"tree attention could not be set up ({error!r})"
        logger.debug("deft: set-up for the draft model failed", exc_info=True)
    else:
        logger.info(
            "deft: the draft model's passes over drafts go through tree attention (workspace %.1f "
            "MiB), its prefill through %s",
            made.attention.workspace_bytes / 2**20, name,
        )  # fmt: skip
        return made
    logger.warning("deft: the draft model's attention runs through %s: %s", name, reason)
    return None


def _unsupported(runner: Any, name: str) -> str | None:
    if read_end() is None:
        return "SGLang 0.5.18 or newer is needed"
    if decodes_per_rank(runner.server_args):
        return "DP attention is not supported"
    arguments = resolved(runner.server_args)
    if getattr(arguments, "enable_multi_layer_eagle", False):
        return "several draft layers (enable_multi_layer_eagle) are not supported"
    if getattr(arguments, "speculative_draft_window_size", None):
        return "a window for drafts (speculative_draft_window_size) is not supported"
    return ignored_scales(runner, name) or unsupported_model(runner)


def _parts(runner: Any, settings: Settings) -> _Parts:
    division, (heads, kv_heads, dim) = divided(runner)
    query_tokens = draft_tokens(runner.server_args)
    largest = min(settings.max_batch, runner.req_to_token_pool.size)
    attention = TreeAttention(
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype,
        device=device_of(runner),
        max_batch=planned_on_device(largest, query_tokens, heads // kv_heads),
        query_tokens=query_tokens,
        policy=settings.policy,
    )
    _ = attention.device_planner  # fail here, not in the first step
    if attention.device.type == "cuda":
        take_compiled_kernels(settings, attention.device)
        warm_up(attention, runner, settings, division.tree, on_device=True)
    return _Parts(
        attention,
        state_of(runner, division, NAME, settings.policy),
        division,
        compiler_of(attention, runner, settings, division.tree),
    )

"""The versions of SGLang that get tree attention; functions hide their differences."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from deft_backend.hosts.common.contract import TestedVersions, first_missing
from deft_backend.hosts.sglang.contract import CONTRACT as CONTRACT

if TYPE_CHECKING:
    import torch

SGLANG = TestedVersions(
    "SGLang",
    ("sglang",),
    "0.5.17",
    "0.5.24",
    mla=("<0.5.18", ">=0.5.23,<0.5.24"),
)
"""Versions that get tree attention without ``DEFT_UNTESTED_HOST``."""


def resolving_method() -> str:
    """Name of the method in which ``ServerArgs`` resolves itself.

    From 0.5.19 on, launchers and every process that publishes the arguments call it.
    """
    from sglang.srt.server_args import ServerArgs

    return "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"


def add_backend_name(name: str) -> None:
    from sglang.srt import server_args as host

    if name not in host.ATTENTION_BACKEND_CHOICES:
        host.add_attention_backend_choices([name])


def resolved(server_args: Any) -> Any:
    """The arguments with the host's decisions, for reading; kept apart from 0.5.19 on."""
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:
        return server_args
    return resolved_view(server_args)


def _answer(server_args: Any, method: str, function: str, read: Any = None) -> Any:
    """What a method of the arguments answers to 0.5.18, and later a function, which may `read`."""
    if hasattr(server_args, method):
        return getattr(server_args, method)()
    from sglang.srt.arg_groups import overrides

    return getattr(overrides, function)(server_args if read is None else read(server_args))


def backend_names(server_args: Any) -> tuple[str | None, str | None]:
    """The resolved backends for prefill and decode; None for placeholder models."""
    prefill, decode = _answer(
        server_args, "get_attention_backends", "attention_backends_of", resolved
    )
    return prefill, decode


def uses_mla(server_args: Any) -> bool:
    return bool(_answer(server_args, "use_mla_backend", "use_mla_backend"))


def model_config(server_args: Any) -> Any:
    return _answer(server_args, "get_model_config", "model_config_of")


def decodes_per_rank(server_args: Any) -> bool:
    """Whether each attention rank decodes its own requests (DP attention).

    From 0.5.22, ``attn_dp_size`` holds the answer.
    """
    args = resolved(server_args)
    per_rank = bool(getattr(args, "enable_dp_attention", False))
    return per_rank or (getattr(args, "attn_dp_size", 1) or 1) > 1


def decode_graphs(server_args: Any) -> str:
    return str(resolved(server_args).cuda_graph_config.decode.backend)


def disable_decode_graphs(server_args: Any) -> None:
    """Turn decode CUDA graphs off, in the process that resolved the arguments.

    From 0.5.19, resolved arguments take a new configuration only as one more decision.
    """
    args = resolved(server_args)
    config = args.cuda_graph_config
    if config.decode.backend == "disabled":
        return
    if args is server_args:
        config.decode.backend = "disabled"
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    config = copy.deepcopy(config)  # the host may share this object
    config.decode.backend = "disabled"
    declare_resolution(server_args, "deft", cuda_graph_config=config)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def ranks(runner: Any) -> Any:
    """``tp_rank``, ``pp_rank``, ``dp_rank`` and ``attn_tp_rank``; to 0.5.20 the runner's ``ps``."""
    held = getattr(runner, "ps", None)
    return _parallel() if held is None else held


def tensor_parallel_group(runner: Any) -> Any:
    """The group of a model runner's tensor-parallel ranks; to 0.5.21 the runner's attribute."""
    return runner.tp_group if hasattr(runner, "tp_group") else _parallel().tp_group


def attention_ranks() -> int:
    return int(_parallel().attn_tp_size)


def attention_layers(model: Any) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention

    return [part for part in model.modules() if isinstance(part, RadixAttention)]


def sinks_of_layers(model: Any) -> dict[int, torch.Tensor]:
    """The sinks of layers, by the layers' ids; held by the modules around, under many names."""
    layers = set(attention_layers(model))
    return {
        layer.layer_id: sinks
        for part in model.modules()
        for layer in layers.intersection(part.children())
        for name, sinks in part.named_parameters(recurse=False)
        if "sink" in name
    }


def first_rows(forward_batch: Any, tokens: int, requests: int) -> Any:
    """The host's slice of a batch, made for its overlap of two halves; raises for some batches."""
    from sglang.srt.batch_overlap.two_batch_overlap import TboForwardBatchPreparer

    return TboForwardBatchPreparer.filter_batch(
        forward_batch,
        start_token_index=0,
        end_token_index=tokens,
        start_seq_index=0,
        end_seq_index=requests,
        out_num_token_non_padded=None,
    )


@functools.cache
def read_end() -> Any:
    """The answer of ``shared_read_ends``; None in 0.5.17, which ``page_table_fence.py`` patches."""
    from sglang.srt.layers.attention import base_attn_backend

    ends = getattr(base_attn_backend, "SharedReadEnds", None)
    return None if ends is None else ends.UNKNOWN


def is_set(name: str) -> bool:
    """Whether an environment variable of the host turns something on; not every version has it."""
    from sglang.srt.environ import envs

    setting = getattr(envs, name, None)
    return setting is not None and bool(setting.get())


def disaggregation_role(server_args: Any) -> str:
    """``null``, ``prefill``, ``decode``, or ``decode without radix cache``."""
    args = resolved(server_args)
    role = str(getattr(args, "disaggregation_mode", "null"))
    cached = getattr(args, "disaggregation_decode_enable_radix_cache", False)
    return role if role != "decode" or cached else "decode without radix cache"


def deterministic(server_args: Any) -> bool:
    return bool(getattr(resolved(server_args), "enable_deterministic_inference", False))


def draft_tokens(server_args: Any) -> int:
    args = resolved(server_args)
    if getattr(args, "speculative_algorithm", None) is None:
        return 1
    return int(args.speculative_num_draft_tokens)


def drafts_trees(server_args: Any) -> bool:
    args = resolved(server_args)
    ngrams = str(args.speculative_algorithm).upper() == "NGRAM"
    return ngrams or (getattr(args, "speculative_eagle_topk", None) or 1) > 1


def draft_links(spec_info: Any) -> tuple[Any, Any] | None:
    """Each draft token's first child and next sibling, ``[B, n]``; None during a capture."""
    child, sibling = spec_info.retrieve_next_token, spec_info.retrieve_next_sibling
    return None if child is None or sibling is None else (child, sibling)


def place_of(request: Any) -> tuple[int | None, int]:
    """A request's row of the page table, None once released, and its tokens in the prefix cache."""
    held = request if hasattr(request, "req_pool_idx") else request.kv
    return held.req_pool_idx, held.cache_protected_len


@functools.cache
def missing() -> str | None:
    return first_missing(CONTRACT, SGLANG.installed())

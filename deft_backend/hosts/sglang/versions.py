"""Everything that depends on SGLang's version: the window, what differs in it, what we use.

The other modules of this folder read as if there were one version. A function here hides each
difference; its comment names the versions. `CONTRACT` (in ``contract_table.py``) lists every member
of the host that we touch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from deft_backend.hosts.common.tested_versions import TestedVersions

SGLANG = TestedVersions("SGLang", ("sglang",), "0.5.17", "0.5.24")
"""Versions that get tree attention without ``DEFT_UNTESTED_HOST``."""

# Arguments -----------------------------------------------------------------------------------


def resolving_method() -> str | None:
    """Name of the method in which ``ServerArgs`` resolves itself, or None.

    ``__post_init__`` in 0.5.17 and 0.5.18. From 0.5.19, ``resolve_once``: launchers call it, and so
    does every process that publishes the arguments.
    """
    from sglang.srt.server_args import ServerArgs

    for name in ("resolve_once", "__post_init__"):
        if callable(getattr(ServerArgs, name, None)):
            return name
    return None


def add_backend_name(name: str) -> None:
    """Make a name a choice of ``--attention-backend``.

    The list of choices moved to another module in 0.5.20; its function has one name in all.
    """
    from sglang.srt import server_args as host

    if name not in host.ATTENTION_BACKEND_CHOICES:
        host.add_attention_backend_choices([name])


def resolved(server_args: Any) -> Any:
    """The arguments with the host's decisions, to read.

    0.5.17 and 0.5.18 write decisions into the arguments. Later ones keep them apart.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:
        return server_args
    return resolved_view(server_args)


def decide(server_args: Any, **fields: Any) -> None:
    """Change resolved arguments, in the process that resolved them."""
    try:
        from sglang.srt.arg_groups import model_override_base  # noqa: F401 - new in 0.5.19
    except ImportError:
        for name, value in fields.items():
            setattr(server_args, name, value)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "deft", **fields)


def backend_names(server_args: Any) -> tuple[str | None, str | None]:
    """The resolved backends for prefill and decode; None for placeholder models."""
    if hasattr(server_args, "get_attention_backends"):  # to 0.5.18
        prefill, decode = server_args.get_attention_backends()
    else:
        from sglang.srt.arg_groups.overrides import attention_backends_of

        prefill, decode = attention_backends_of(resolved(server_args))
    return prefill, decode


def uses_mla(server_args: Any) -> bool:
    """Whether the model's attention is multi-head latent attention."""
    if hasattr(server_args, "use_mla_backend"):  # to 0.5.18
        return bool(server_args.use_mla_backend())
    from sglang.srt.arg_groups.overrides import use_mla_backend

    return bool(use_mla_backend(server_args))


def model_config(server_args: Any) -> Any:
    """The host's description of the model."""
    if hasattr(server_args, "get_model_config"):  # to 0.5.18
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def decodes_per_rank(server_args: Any) -> bool:
    """Whether attention ranks decode requests of their own (DP attention).

    ``enable_dp_attention`` stays False from 0.5.22: ``attn_dp_size`` holds the answer there.
    """
    args = resolved(server_args)
    return (
        bool(getattr(args, "enable_dp_attention", False))
        or (getattr(args, "attn_dp_size", 1) or 1) > 1
    )


def decode_graphs(server_args: Any) -> str:
    """The kind of decode CUDA graphs: "full", "breakable", "disabled", …"""
    return str(resolved(server_args).cuda_graph_config.decode.backend)


def disable_decode_graphs(server_args: Any) -> None:
    """Turn decode CUDA graphs off; a new configuration, for the host may share the old one."""
    import copy

    config = copy.deepcopy(resolved(server_args).cuda_graph_config)
    config.decode.backend = "disabled"
    decide(server_args, cuda_graph_config=config)


# Backends ------------------------------------------------------------------------------------


def names_function() -> str:
    """The function that the host asks for its backends' names right before it builds them.

    A method of ``ServerArgs`` in 0.5.17; later a function of its own.
    """
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "attention_backends"):
        return "sglang.srt.runtime_context.attention_backends"
    return "sglang.srt.server_args.ServerArgs.get_attention_backends"


def decode_backend_name(runner: Any) -> str:
    """What the host calls the decode backend of a model runner."""
    return str(runner.decode_attention_backend_str)


# Ranks and devices ---------------------------------------------------------------------------


def ranks(runner: Any) -> Any:
    """``tp_rank``, ``pp_rank``, ``dp_rank`` and ``attn_tp_rank`` of a model runner.

    The model runner holds them as ``ps`` to 0.5.20.
    """
    held = getattr(runner, "ps", None)
    if held is not None:
        return held
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def tensor_parallel_group(runner: Any) -> Any:
    """The group of a model runner's tensor-parallel ranks; an attribute of it to 0.5.21."""
    if hasattr(runner, "tp_group"):
        return runner.tp_group
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


def attention_ranks() -> int:
    """Tensor-parallel ranks that share the attention heads."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


# CUDA graphs and the page-table fence --------------------------------------------------------


@functools.cache
def read_end() -> Any:
    """The answer "page tables are read until the forward ends" of ``shared_read_ends``.

    None in 0.5.17, which does not ask; ``deft_patches/sglang_page_table_fence.py`` serves there.
    """
    from sglang.srt.layers.attention import base_attn_backend

    ends = getattr(base_attn_backend, "SharedReadEnds", None)
    return None if ends is None else ends.UNKNOWN


def metadata_graphs() -> bool:
    """Whether the host replays the preparation of metadata, too, from a graph (0.5.19 on).

    Off unless its environment variable asks. Then the backend does not see every replay.
    """
    from sglang.srt.environ import envs

    setting = getattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH", None)
    return setting is not None and bool(setting.get())


# Requests and prefix caches ------------------------------------------------------------------


def place_of(request: Any) -> tuple[int | None, int]:
    """A request's row of the page table, and how many of its tokens the prefix cache owns.

    The row is None once the host has released the request. Attributes of the request to 0.5.18,
    of its ``kv`` later.
    """
    held = request if hasattr(request, "req_pool_idx") else request.kv
    return held.req_pool_idx, held.cache_protected_len


TreePaths = Callable[[Sequence[int]], Sequence[Sequence[Any]]]
"""From ids of tree nodes to the nodes from the root (left out) to each, as ``node_id``,
``path_start``, ``path_end`` and ``full_value_len``, its tokens on the device (or None)."""


def tree_paths(tree_cache: Any) -> TreePaths | None:
    """The function of a unified tree that lists paths, or None if its nodes cannot be read.

    From 0.5.22, whether the core is in Rust or in Python. Trees with components besides full
    attention (sliding windows, Mamba) and trees of bigrams are left out.
    """
    core: Any = getattr(tree_cache, "tree_core", None)
    paths: TreePaths | None = getattr(core, "collect_path_info", None)
    if paths is None or len(tree_cache.tree_components) != 1 or core.is_eagle:
        return None
    return paths

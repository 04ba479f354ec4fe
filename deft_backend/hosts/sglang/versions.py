"""Everything that depends on SGLang's version: the window, its differences, the members we use.

The other modules of this folder read as if there were one version. A function here hides each
difference; its docstring names the versions. `CONTRACT`, at the end, lists every member of the host
that we use.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.contract import Member, check_contract, installed_source

if TYPE_CHECKING:
    import torch

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
    """Add a name to the choices of ``--attention-backend``.

    The list of choices moved to another module in 0.5.20; its function kept its name.
    """
    from sglang.srt import server_args as host

    if name not in host.ATTENTION_BACKEND_CHOICES:
        host.add_attention_backend_choices([name])


def resolved(server_args: Any) -> Any:
    """The arguments with the host's decisions, for reading.

    0.5.17 and 0.5.18 write decisions into the arguments. Later versions keep decisions apart.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:
        return server_args
    return resolved_view(server_args)


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
    """Whether each attention rank decodes its own requests (DP attention).

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
    """Turn decode CUDA graphs off, in the process that resolved the arguments.

    Resolved arguments refuse assignment. To 0.5.18 this changes the configuration itself; later
    versions take a new configuration as one more decision.
    """
    config = resolved(server_args).cuda_graph_config
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view  # noqa: F401
    except ImportError:
        config.decode.backend = "disabled"
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    config = copy.deepcopy(config)  # the host may share this object
    config.decode.backend = "disabled"
    declare_resolution(server_args, "deft", cuda_graph_config=config)


# Backends ------------------------------------------------------------------------------------


def names_function() -> str:
    """The function that the host calls for its backends' names right before it builds them.

    In 0.5.17 a method of ``ServerArgs``; later a module's function.
    """
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "attention_backends"):
        return "sglang.srt.runtime_context.attention_backends"
    return "sglang.srt.server_args.ServerArgs.get_attention_backends"


def decode_backend_name(runner: Any) -> str:
    """The host's name for the decode backend of a model runner."""
    return str(runner.decode_attention_backend_str)


# Ranks and devices ---------------------------------------------------------------------------


def ranks(runner: Any) -> Any:
    """``tp_rank``, ``pp_rank``, ``dp_rank`` and ``attn_tp_rank`` of a model runner.

    To 0.5.20 the model runner holds them as ``ps``.
    """
    held = getattr(runner, "ps", None)
    if held is not None:
        return held
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def tensor_parallel_group(runner: Any) -> Any:
    """The group of a model runner's tensor-parallel ranks; to 0.5.21 the runner's attribute."""
    if hasattr(runner, "tp_group"):
        return runner.tp_group
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


def attention_ranks() -> int:
    """Tensor-parallel ranks that share the attention heads."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_size)


def attention_layers(model: Any) -> list[Any]:
    """The model's ``RadixAttention`` layers on this rank, in the model's order."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [part for part in model.modules() if isinstance(part, RadixAttention)]


def sinks_of_layers(model: Any) -> dict[int, torch.Tensor]:
    """The sinks of layers, by the layers' ids: the module around a layer holds them.

    The names differ between models: ``sinks``, ``attention_sink_bias``.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    return {
        layer.layer_id: sinks
        for part in model.modules()
        for layer in part.children()
        if isinstance(layer, RadixAttention)
        for name, sinks in part.named_parameters(recurse=False)
        if "sink" in name
    }


# CUDA graphs and the page-table fence --------------------------------------------------------


@functools.cache
def read_end() -> Any:
    """The answer "page tables are read until the forward ends" of ``shared_read_ends``.

    None in 0.5.17, which does not ask; there ``deft_patches/sglang_page_table_fence.py`` does this.
    """
    from sglang.srt.layers.attention import base_attn_backend

    ends = getattr(base_attn_backend, "SharedReadEnds", None)
    return None if ends is None else ends.UNKNOWN


def metadata_graphs() -> bool:
    """Whether the host also replays the preparation of metadata from a graph (0.5.19 on).

    This is off unless an environment variable turns it on. Then the backend does not see every
    replay.
    """
    from sglang.srt.environ import envs

    setting = getattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH", None)
    return setting is not None and bool(setting.get())


# Speculation ---------------------------------------------------------------------------------


def draft_tokens(server_args: Any) -> int:
    """Query tokens of a request in a verification; 1 if the server does not speculate."""
    args = resolved(server_args)
    if getattr(args, "speculative_algorithm", None) is None:
        return 1
    return int(args.speculative_num_draft_tokens)


def drafts_trees(server_args: Any) -> bool:
    """Whether a server drafts trees, not chains: n-grams, or a ``topk`` above 1."""
    args = resolved(server_args)
    ngrams = str(args.speculative_algorithm).upper() == "NGRAM"
    return ngrams or (getattr(args, "speculative_eagle_topk", None) or 1) > 1


def draft_links(spec_info: Any) -> tuple[Any, Any] | None:
    """Each draft token's first child and next sibling, ``[B, n]``; None during a capture."""
    child, sibling = spec_info.retrieve_next_token, spec_info.retrieve_next_sibling
    return None if child is None or sibling is None else (child, sibling)


# Requests and prefix caches ------------------------------------------------------------------


def place_of(request: Any) -> tuple[int | None, int]:
    """A request's row of the page table, and how many of its tokens the prefix cache owns.

    The row is None once the host has released the request. To 0.5.18 these are attributes of the
    request, later of its ``kv``.
    """
    held = request if hasattr(request, "req_pool_idx") else request.kv
    return held.req_pool_idx, held.cache_protected_len


TreePaths = Callable[[Sequence[int]], Sequence[Sequence[Any]]]
"""From ids of tree nodes to the path to each, without the root. Its nodes have ``node_id``,
``path_start``, ``path_end`` and ``full_value_len``: the node's tokens on the device, or None."""


def tree_paths(tree_cache: Any) -> TreePaths | None:
    """The function of a unified tree that lists paths, or None if its nodes cannot be read.

    It exists from 0.5.22, for the core in Rust and for the core in Python. Trees of bigrams and
    trees with other components than full attention (sliding windows, Mamba) get None.
    """
    core: Any = getattr(tree_cache, "tree_core", None)
    paths: TreePaths | None = getattr(core, "collect_path_info", None)
    if paths is None or len(tree_cache.tree_components) != 1 or core.is_eagle:
        return None
    return paths


# What we use of the host ----------------------------------------------------------------------

_ARGS = "sglang.srt.server_args"
_OVERRIDES = "sglang.srt.arg_groups.overrides"
_VIEWS = "sglang.srt.arg_groups.model_override_base"
_BACKEND = "sglang.srt.layers.attention.base_attn_backend"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_LAYER = "sglang.srt.layers.radix_attention"
_RUNNER = "sglang.srt.model_executor.model_runner"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
_POOL = "sglang.srt.mem_cache.memory_pool"
_REQUEST = "sglang.srt.managers.schedule_batch"
_CONTEXT = "sglang.srt.runtime_context"
_HOOKS = "sglang.srt.plugins.hook_registry"


def _read(module: str, owner: str, names: str, use: str, versions: str = "") -> tuple[Member, ...]:
    """Members for the attributes of one class that we read."""
    return tuple(
        Member(module, f"{owner}.{name}", versions=versions, use=use) for name in names.split()
    )


CONTRACT: tuple[Member, ...] = (
    # The plugin and the arguments.
    Member(_HOOKS, "HookRegistry.register", ("target", "hook", "hook_type"), use="put hooks in"),
    Member(_HOOKS, "HookType.AROUND", use="the kind of our hooks"),
    Member(_ARGS, "ServerArgs.__post_init__", versions="<0.5.19", use="hooked: arguments resolve"),
    Member(_ARGS, "ServerArgs.resolve_once", versions=">=0.5.19", use="hooked: arguments resolve"),
    Member(_ARGS, "add_attention_backend_choices", use="called: add the choice deft"),
    Member(_ARGS, "ATTENTION_BACKEND_CHOICES", use="read: is the choice there"),
    Member(_ARGS, "ServerArgs.get_attention_backends", versions="<0.5.19", use="called"),
    Member(_ARGS, "ServerArgs.use_mla_backend", versions="<0.5.19", use="called"),
    Member(_ARGS, "ServerArgs.get_model_config", versions="<0.5.19", use="called"),
    Member(_VIEWS, "resolved_view", ("server_args",), ">=0.5.19", "called: read decisions"),
    Member(_VIEWS, "attention_backends_of", ("cfg",), ">=0.5.19", "called"),
    Member(_VIEWS, "use_mla_backend", ("server_args",), ">=0.5.19", "called"),
    Member(_VIEWS, "model_config_of", ("server_args",), ">=0.5.19", "called"),
    Member(_OVERRIDES, "attention_backends_of", versions=">=0.5.19", use="imported from there"),
    Member(_OVERRIDES, "use_mla_backend", versions=">=0.5.19", use="imported from there"),
    Member(_OVERRIDES, "model_config_of", versions=">=0.5.19", use="imported from there"),
    Member(_OVERRIDES, "declare_resolution", ("server_args", "source"), ">=0.5.19",
           "called: turn decode graphs off"),
    Member("sglang.srt.model_executor.cuda_graph_config", "CudaGraphConfig.decode",
           use="read and written: the kind of decode graphs"),
    Member("sglang.srt.model_executor.cuda_graph_config", "PhaseConfig.backend",
           use="read and written: the kind of decode graphs"),
    Member("sglang.srt.environ", "envs", use="read: settings that change graphs and memory"),
    *_read("sglang.srt.configs.model_config", "ModelConfig",
           "is_encoder_decoder num_attention_heads", "read: what the model is"),
    # Backends.
    Member(_REGISTRY, "ATTENTION_BACKENDS", use="read: the backends to surround"),
    Member(_REGISTRY, "register_attention_backend", ("name",), use="called: surround backends"),
    Member(_CONTEXT, "attention_backends", versions=">=0.5.18", use="hooked: backends are built"),
    Member(_BACKEND, "AttentionBackend.init_forward_metadata", ("forward_batch",),
           use="overridden: an eager step begins"),
    Member(_BACKEND, "AttentionBackend.init_forward_metadata_out_graph",
           ("forward_batch", "in_capture"), use="overridden: a capture or a replay begins"),
    Member(_BACKEND, "AttentionBackend.init_forward_metadata_in_graph", ("forward_batch",),
           use="overridden: launches of the graph"),
    Member(_BACKEND, "AttentionBackend.forward",
           ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"), use="overridden"),
    Member(_BACKEND, "AttentionBackend.forward_decode",
           ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"), use="overridden"),
    Member(_BACKEND, "AttentionBackend.forward_extend", use="overridden"),
    Member(_BACKEND, "AttentionBackend.forward_mixed", use="overridden"),
    Member(_BACKEND, "AttentionBackend.needs_cpu_seq_lens", use="overridden"),
    Member(_BACKEND, "AttentionBackend.shared_read_ends", ("fm",), ">=0.5.18",
           "overridden: page tables are read until the forward ends"),
    Member(_BACKEND, "SharedReadEnds.UNKNOWN", versions=">=0.5.18", use="our answer there"),
    *_read(_LAYER, "RadixAttention",
           "layer_id tp_q_head_num tp_k_head_num tp_v_head_num qk_head_dim v_head_dim scaling "
           "logit_cap logit_capping_method sliding_window_size is_cross_attention attn_type "
           "use_irope pos_encoding_mode xai_temperature_len", "read: what a layer computes"),
    # Batches, requests and prefix caches.
    Member(_BATCH, "ForwardBatch.init_new", ("batch", "model_runner"), use="wrapped: see requests"),
    *_read(_BATCH, "ForwardBatch",
           "forward_mode batch_size rids req_pool_indices seq_lens seq_lens_cpu seq_lens_sum "
           "out_cache_loc spec_info", "read: the batch"),
    Member(_BATCH, "ForwardMode.is_decode", use="called"),
    Member(_BATCH, "ForwardMode.is_target_verify", use="called"),
    # Speculation.
    Member(_BACKEND, "AttentionBackend.update_verify_buffers_to_fill_after_draft",
           ("spec_info", "cuda_graph_bs"), use="overridden: the links are complete"),
    *_read("sglang.srt.speculative.eagle_info", "EagleVerifyInput",
           "topk draft_token_num retrieve_next_token retrieve_next_sibling",
           "read: what a step verifies"),
    *_read("sglang.srt.speculative.ngram_info", "NgramVerifyInput",
           "draft_token_num retrieve_next_token retrieve_next_sibling",
           "read: what a step verifies"),
    *_read(_REQUEST, "ScheduleBatch", "reqs tree_cache", "read: the requests of a batch"),
    *_read(_REQUEST, "Req", "rid last_node", "read: a request and its node"),
    *_read(_REQUEST, "Req", "spec_verify_ct spec_num_correct_drafts", "read: accepted drafts"),
    *_read(_REQUEST, "Req", "req_pool_idx cache_protected_len", "read: row and tokens", "<0.5.19"),
    Member(_REQUEST, "Req.kv", versions=">=0.5.19", use="read: row and tokens"),
    *_read(_REQUEST, "ReqKvInfo", "req_pool_idx cache_protected_len", "read: row and tokens",
           ">=0.5.19"),
    Member("sglang.srt.mem_cache.radix_cache", "RadixCache", use="known by its name: a tree"),
    *_read("sglang.srt.mem_cache.radix_cache", "TreeNode", "id parent key", "read: a node"),
    Member("sglang.srt.mem_cache.chunk_cache", "ChunkCache", versions="<0.5.22",
           use="known by its name: no tree"),
    *_read("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache",
           "tree_core tree_components", "read: the unified tree", ">=0.5.22"),
    Member("sglang.srt.mem_cache.unified_cache.unified_tree_core_interface",
           "UnifiedTreeCoreInterface.collect_path_info", ("end_node_ids",), ">=0.5.22",
           "called: the nodes above each request"),
    *_read("sglang.srt.mem_cache.unified_cache.unified_tree_core_interface", "TreePathNodeInfo",
           "node_id path_start path_end full_value_len", "read: a node", ">=0.5.22"),
    # The model runner, its pools and its ranks.
    *_read(_RUNNER, "ModelRunner",
           "server_args device dtype kv_cache_dtype model model_config is_draft_worker gpu_id "
           "req_to_token_pool token_to_kv_pool decode_attention_backend_str",
           "read: the model and where it runs"),
    Member(_RUNNER, "ModelRunner._decode_cuda_graph_runner_cls", versions=">=0.5.19",
           use="called: the class of its graph runner, where it has this method"),
    *_read(_RUNNER, "ModelRunner", "ps", "read: ranks", "<0.5.21"),
    *_read(_RUNNER, "ModelRunner", "tp_group", "read: ranks that must agree", "<0.5.22"),
    Member(_CONTEXT, "get_parallel", use="called: ranks"),
    Member(_POOL, "MHATokenToKVPool", use="known by its name: the one pool that we read"),
    *_read("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool", "full_kv_pool layers_mapping",
           "read: the layers without sliding windows"),
    *_read(_POOL, "HybridLinearKVPool", "full_kv_pool full_attention_layer_id_mapping",
           "read: the layers that are not linear"),
    *_read(_POOL, "HybridReqToTokenPool", "mamba_map", "read: the layers that are linear"),
    Member(_POOL, "MHATokenToKVPool.get_key_buffer", ("layer_id",), use="called"),
    Member(_POOL, "MHATokenToKVPool.get_value_buffer", ("layer_id",), use="called"),
    Member(_POOL, "MHATokenToKVPool.set_kv_buffer", ("layer", "loc_info", "cache_k", "cache_v"),
           use="called: write a token's keys and values"),
    *_read(_POOL, "MHATokenToKVPool",
           "start_layer layer_num store_dtype kv_cache_layout use_hnd", "read: the KV cache"),
    Member(_POOL, "KVWriteLoc", ("loc", "swa_loc"), use="made: where a token is written"),
    *_read(_POOL, "ReqToTokenPool", "req_to_token size", "read: the page table"),
    # Decode CUDA graphs and the fence.
    Member(_GRAPHS, "DecodeCudaGraphRunner.capture_one_shape",
           ("size", "forward", "stream_idx", "variant_label"), use="wrapped: the second set"),
    Member(_GRAPHS, "DecodeCudaGraphRunner._resolve_lora_variant", ("forward_batch",),
           use="wrapped: choose between the sets"),
    Member(_GRAPHS, "DecodeCudaGraphRunner.execute", ("forward_batch", "pp_proxy_tensors"),
           "<0.5.18", "wrapped: the fence"),
    Member(_GRAPHS, "DecodeCudaGraphRunner.model_runner", use="read: whose graphs they are"),
    *_read(_RUNNER, "ModelRunner", "war_fastpath_read_done_event", "written: the fence", "<0.5.18"),
    Member("sglang.srt.managers.scheduler", "Scheduler._apply_war_barrier",
           use="looked for: page-table writes wait for the forward"),
)  # fmt: skip
"""Every member of SGLang that we use."""


@functools.cache
def missing() -> str | None:
    """Which members of the contract this environment's SGLang lacks, in one line; or None."""
    source, version = installed_source("sglang"), SGLANG.installed()
    if source is None or version is None:
        return None  # not installed as a distribution: there is no source to read
    lacking = [p for p in check_contract(CONTRACT, source, version) if p.readable]
    if not lacking:
        return None
    more = f" and {len(lacking) - 1} more; `deft contracts` lists them" if len(lacking) > 1 else ""
    return f"{lacking[0]}{more}"

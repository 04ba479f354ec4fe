"""Every module, class, method, parameter and field of SGLang that we use.

``versions.py`` hides the differences between the versions and checks this table.
"""

from __future__ import annotations

from deft_backend.hosts.common.contract import Member, every

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


_CALL = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
_DRAFTS = "draft_token_num retrieve_next_token retrieve_next_sibling"


CONTRACT: tuple[Member, ...] = (
    # The plugin and the arguments.
    Member(_HOOKS, "HookRegistry.register", ("target", "hook", "hook_type"), use="put hooks in"),
    Member(_HOOKS, "HookType.AROUND", use="the kind of our hooks"),
    Member(_ARGS, "ServerArgs.__post_init__", versions="<0.5.19", use="hooked: arguments resolve"),
    Member(_ARGS, "ServerArgs.resolve_once", versions=">=0.5.19", use="hooked: arguments resolve"),
    Member(_ARGS, "add_attention_backend_choices", use="called: add the choice deft"),
    Member(_ARGS, "ATTENTION_BACKEND_CHOICES", use="read: is the choice there"),
    *every(_ARGS, "ServerArgs", "get_attention_backends use_mla_backend get_model_config",
           "called", "<0.5.19"),
    Member(_VIEWS, "resolved_view", ("server_args",), ">=0.5.19", "called: read decisions"),
    Member(_VIEWS, "attention_backends_of", ("cfg",), ">=0.5.19", "called"),
    Member(_VIEWS, "use_mla_backend", ("server_args",), ">=0.5.19", "called"),
    Member(_VIEWS, "model_config_of", ("server_args",), ">=0.5.19", "called"),
    *every(_OVERRIDES, "", "attention_backends_of use_mla_backend model_config_of",
           "imported from there", ">=0.5.19"),
    Member(_OVERRIDES, "declare_resolution", ("server_args", "source"), ">=0.5.19",
           "called: turn decode graphs off"),
    *every("sglang.srt.model_executor.cuda_graph_config", "",
           "CudaGraphConfig.decode PhaseConfig.backend",
           "read and written: the kind of decode graphs"),
    Member("sglang.srt.environ", "envs", use="read: settings that change graphs and memory"),
    *every("sglang.srt.configs.model_config", "ModelConfig",
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
    Member(_BACKEND, "AttentionBackend.forward", _CALL, use="overridden"),
    Member(_BACKEND, "AttentionBackend.forward_decode", _CALL, use="overridden"),
    *every(_BACKEND, "AttentionBackend", "forward_extend",
           "overridden"),
    Member(_BACKEND, "AttentionBackend.shared_read_ends", ("fm",), ">=0.5.18",
           "overridden: page tables are read until the forward ends"),
    Member(_BACKEND, "AttentionBackend.resolve_prefill_shared_read_ends", ("forward_batch",),
           ">=0.5.23", "overridden: the same for mixed steps"),
    Member(_BACKEND, "SharedReadEnds.UNKNOWN", versions=">=0.5.18", use="our answer there"),
    Member(_BACKEND, "SharedReadEnds.PRE_REPLAY", versions=">=0.5.23",
           use="looked for: the host still distinguishes earlier ends from our answer"),
    Member(_RUNNER, "ModelRunner.shared_read_done_event", versions=">=0.5.23",
           use="looked for: one event still tells when page tables may be written"),
    *every(_LAYER, "RadixAttention",
           "layer_id tp_q_head_num tp_k_head_num tp_v_head_num qk_head_dim v_head_dim scaling "
           "logit_cap logit_capping_method sliding_window_size is_cross_attention attn_type "
           "use_irope pos_encoding_mode xai_temperature_len", "read: what a layer computes"),
    # Batches, requests and prefix caches.
    Member(_BATCH, "ForwardBatch.init_new", ("batch", "model_runner"), use="wrapped: see requests"),
    *every(_BATCH, "ForwardBatch",
           "forward_mode batch_size rids req_pool_indices seq_lens seq_lens_cpu seq_lens_sum "
           "out_cache_loc spec_info extend_seq_lens extend_seq_lens_cpu mm_inputs encoder_lens "
           "attn_cp_metadata tbo_children global_num_tokens_cpu", "read: the batch"),
    *every(_BATCH, "ForwardMode", "is_decode is_mixed is_target_verify", "called"),
    # Speculation.
    Member(_BACKEND, "AttentionBackend.update_verify_buffers_to_fill_after_draft",
           ("spec_info", "cuda_graph_bs"), use="overridden: the links are complete"),
    *every("sglang.srt.speculative.eagle_info", "EagleVerifyInput", f"topk {_DRAFTS}",
           "read: what a step verifies"),
    *every("sglang.srt.speculative.ngram_info", "NgramVerifyInput", _DRAFTS,
           "read: what a step verifies"),
    *every(_REQUEST, "ScheduleBatch", "reqs tree_cache decoding_reqs", "read: the requests"),
    *every(_REQUEST, "Req", "rid last_node", "read: a request and its node"),
    *every(_REQUEST, "Req", "spec_verify_ct spec_num_correct_drafts", "read: accepted drafts"),
    Member(_REQUEST, "Req.seqlen", use="read: tokens of a batch that may share little"),
    *every(_REQUEST, "Req", "req_pool_idx cache_protected_len", "read: row and tokens", "<0.5.19"),
    Member(_REQUEST, "Req.kv", versions=">=0.5.19", use="read: row and tokens"),
    *every(_REQUEST, "ReqKvInfo", "req_pool_idx cache_protected_len", "read: row and tokens",
           ">=0.5.19"),
    Member("sglang.srt.mem_cache.radix_cache", "RadixCache", use="known by its name: a tree"),
    *every("sglang.srt.mem_cache.radix_cache", "TreeNode", "id parent key", "read: a node"),
    Member("sglang.srt.mem_cache.chunk_cache", "ChunkCache", versions="<0.5.22",
           use="known by its name: no tree"),
    *every("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache",
           "tree_core tree_components", "read: the unified tree", ">=0.5.22"),
    Member("sglang.srt.mem_cache.unified_cache.unified_tree_core_interface",
           "UnifiedTreeCoreInterface.collect_path_info", ("end_node_ids",), ">=0.5.22",
           "called: the nodes above each request"),
    *every("sglang.srt.mem_cache.unified_cache.unified_tree_core_interface", "TreePathNodeInfo",
           "node_id path_start path_end full_value_len", "read: a node", ">=0.5.22"),
    # The model runner, its pools and its ranks.
    *every(_RUNNER, "ModelRunner",
           "server_args device dtype kv_cache_dtype model model_config is_draft_worker gpu_id "
           "req_to_token_pool token_to_kv_pool decode_attention_backend_str",
           "read: the model and where it runs"),
    Member(_RUNNER, "ModelRunner._decode_cuda_graph_runner_cls", versions=">=0.5.19",
           use="called: the class of its graph runner, where it has this method"),
    *every(_RUNNER, "ModelRunner", "ps", "read: ranks", "<0.5.21"),
    *every(_RUNNER, "ModelRunner", "tp_group", "read: ranks that must agree", "<0.5.22"),
    Member(_CONTEXT, "get_parallel", use="called: ranks"),
    Member(_POOL, "MHATokenToKVPool", use="known by its name: the one pool that we read"),
    *every("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool", "full_kv_pool layers_mapping",
           "read: the layers without sliding windows"),
    *every(_POOL, "HybridLinearKVPool", "full_kv_pool full_attention_layer_id_mapping",
           "read: the layers that are not linear"),
    *every(_POOL, "HybridReqToTokenPool", "mamba_map", "read: the layers that are linear"),
    Member(_POOL, "MHATokenToKVPool.get_key_buffer", ("layer_id",), use="called"),
    Member(_POOL, "MHATokenToKVPool.get_value_buffer", ("layer_id",), use="called"),
    Member(_POOL, "MHATokenToKVPool.set_kv_buffer", ("layer", "loc_info", "cache_k", "cache_v"),
           use="called: write a token's keys and values"),
    *every(_POOL, "MHATokenToKVPool",
           "start_layer layer_num store_dtype kv_cache_layout use_hnd", "read: the KV cache"),
    Member(_POOL, "KVWriteLoc", ("loc", "swa_loc"), use="made: where a token is written"),
    *every(_POOL, "ReqToTokenPool", "req_to_token size", "read: the page table"),
    # Multi-head latent attention.
    Member(_POOL, "MLATokenToKVPool", use="known by its name: the pool of latent vectors"),
    Member(_POOL, "MLATokenToKVPool.get_key_buffer", ("layer_id",), use="called"),
    Member(_POOL, "MLATokenToKVPool.set_mla_kv_buffer", ("layer", "cache_k_nope", "cache_k_rope"),
           use="called: write a token's latent vector"),
    *every(_POOL, "MLATokenToKVPool", "store_dtype", "read: the KV cache"),
    *every("sglang.srt.configs.model_config", "ModelConfig", "hf_text_config",
           "read: is the attention sparse"),
    # Decode CUDA graphs and the fence.
    Member(_GRAPHS, "DecodeCudaGraphRunner.capture_one_shape",
           ("size", "forward", "stream_idx", "variant_label"), use="wrapped: the second set"),
    Member(_GRAPHS, "DecodeCudaGraphRunner._resolve_lora_variant", ("forward_batch",),
           use="wrapped: choose between the sets"),
    Member(_GRAPHS, "DecodeCudaGraphRunner.execute", ("forward_batch", "pp_proxy_tensors"),
           "<0.5.18", "wrapped: the fence"),
    Member(_GRAPHS, "DecodeCudaGraphRunner.model_runner", use="read: whose graphs they are"),
    *every(_RUNNER, "ModelRunner", "war_fastpath_read_done_event", "written: the fence", "<0.5.18"),
    Member("sglang.srt.managers.scheduler", "Scheduler._apply_war_barrier",
           use="looked for: page-table writes wait for the forward"),
)  # fmt: skip
"""Every member of SGLang that we use."""

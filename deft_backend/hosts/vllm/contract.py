"""Every module, class, method, parameter and field of vLLM that we use.

``versions.py`` hides the differences between the versions and checks this table.
"""

from __future__ import annotations

from deft_backend.hosts.common.contract import Member, every

OWN_NAME_SINCE = "0.32"  # the first version in which plugins may add backend names

_BACKEND = "vllm.v1.attention.backend"
_SPEC = "vllm.v1.kv_cache_interface"
_REGISTRY = "vllm.v1.attention.backends.registry"
_LAYER = "vllm.model_executor.layers.attention_layer_base"
_DEFAULTS = "vllm.model_executor.models.config"
_COMPILATION = "vllm.config.compilation"
_SLICES = "vllm.v1.worker.ubatch_utils"
_SCHEDULED = "vllm.v1.core.sched.output"


CONTRACT: tuple[Member, ...] = (
    # Registration: plugin.py
    Member(_REGISTRY, "register_backend", ("backend", "class_path"), use="called, for each name"),
    Member(_REGISTRY, "AttentionBackendEnum.CUSTOM", use="registered: our name in every version"),
    Member(_REGISTRY, "AttentionBackendEnum.register", versions=f">={OWN_NAME_SINCE}",
           use="looked for: new names are accepted"),
    Member(_REGISTRY, "AttentionBackendEnum.CPU_ATTN", use="looked for: the CPU's only backend"),
    Member(_REGISTRY, "AttentionBackendEnum.is_overridden", use="called, on the CPU"),
    *every(_REGISTRY, "AttentionBackendEnum", "FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION",
           "surrounded"),
    *every(_REGISTRY, "AttentionBackendEnum", "TRITON_FLASH_ATTN TRITON_FLASHINFER",
           "made of two others: surrounded", ">=0.30"),
    Member("vllm.platforms.interface", "Platform.is_cpu", use="called"),
    Member("vllm.platforms.interface", "Platform.get_attn_backend_cls",
           ("selected_backend", "attn_selector_config"), use="called, for the host's own choice"),
    Member("vllm.utils.import_utils", "resolve_obj_by_qualname", use="called, for that class"),
    Member("vllm.v1.attention.selector", "AttentionSelectorConfig",
           ("head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type", "use_non_causal"),
           use="made again from what the host asks with"),
    # The backend: registered.py, backend.py
    Member(_BACKEND, "AttentionBackend.validate_configuration",
           ("device_capability", "attn_type"), use="overridden: where the host's choice is made"),
    Member(_BACKEND, "AttentionBackend.full_cls_name", use="overridden: names the class"),
    *every(_BACKEND, "AttentionBackend", "get_impl_cls get_builder_cls", "called, and overridden"),
    *every(_BACKEND, "AttentionBackend", "get_name is_mla is_sparse is_ssm", "called"),
    Member(_BACKEND, "AttentionBackend.forward_includes_kv_cache_update", use="read"),
    # The metadata builder: builder.py, content.py
    Member(_BACKEND, "AttentionMetadataBuilder",
           ("kv_cache_spec", "layer_names", "vllm_config", "device"), use="overridden"),
    Member(_BACKEND, "AttentionMetadataBuilder.build",
           ("common_prefix_len", "common_attn_metadata", "fast_build"), use="overridden"),
    Member(_BACKEND, "AttentionMetadataBuilder.build_for_cudagraph_capture",
           ("common_attn_metadata",), use="overridden: such a batch is no step"),
    Member(_BACKEND, "AttentionMetadataBuilder.build_for_drafting",
           ("common_attn_metadata", "draft_index"), use="overridden: drafts are the host's"),
    Member(_BACKEND, "AttentionMetadataBuilder.update_block_table",
           ("metadata", "blk_table", "slot_mapping"), use="overridden"),
    Member(_BACKEND, "AttentionMetadataBuilder.get_cudagraph_support",
           ("vllm_config", "kv_cache_spec"), use="overridden: uniform batches at most"),
    Member(_BACKEND, "AttentionMetadataBuilder.use_cascade_attention",
           ("common_prefix_len", "query_lens"), "<0.32", use="overridden"),
    *every(_BACKEND, "AttentionCGSupport", "UNIFORM_BATCH NEVER", "read"),
    *every(_BACKEND, "CommonAttentionMetadata",
           "num_reqs num_actual_tokens max_query_len causal is_prefilling mm_req_doc_ranges "
           "dcp_local_seq_lens", "read: whether tree attention computes the batch"),
    *every(_BACKEND, "CommonAttentionMetadata", "seq_lens block_table_tensor query_start_loc",
           "read: planned from, on the device"),
    *every(_BACKEND, "CommonAttentionMetadata", "query_start_loc_cpu seq_lens_cpu_upper_bound",
           "read: verified tokens, and bytes that the host's kernel reads"),
    # Mixed steps: mixed.py, builder.py
    Member(_SLICES, "UBatchSlice", ("request_slice", "token_slice"), use="made: a part of a batch"),
    Member(_SLICES, "_make_metadata_with_slice", ("ubatch_slice", "attn_metadata"),
           use="called, for the rest of a mixed step"),
    *every(_BACKEND, "CommonAttentionMetadata", "logits_indices_padded encoder_seq_lens",
           "read: such a batch is not split"),
    Member(_BACKEND, "AttentionMetadataBuilder.reorder_batch_threshold",
           use="set, so that model runner V1 puts decode rows first"),
    # The implementation: backend.py, layers.py
    Member(_BACKEND, "AttentionImpl",
           ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
            "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
           use="overridden: what a layer needs is read from its arguments"),
    Member(_BACKEND, "AttentionImpl.forward",
           ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
           use="overridden: where decode runs"),
    # Multi-head latent attention: latent.py, backend.py
    Member(_BACKEND, "MLAAttentionImpl",
           ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim",
            "v_head_dim", "kv_b_proj"), use="overridden: what a layer needs is read"),
    Member(_BACKEND, "MLAAttentionImpl.forward_mqa",
           ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
           use="overridden: where decode runs"),
    Member(_BACKEND, "AttentionImplBase.need_to_return_lse_for_decode", use="read"),
    Member(_SPEC, "MLAAttentionSpec.cache_dtype_str", use="read"),
    Member("vllm.v1.worker.gpu.cudagraph_utils", "ModelCudaGraphManager.capture", ("model",),
           use="wrapped: captures a second set of graphs"),
    Member("vllm.v1.worker.gpu.cudagraph_utils", "ModelCudaGraphManager.run_fullgraph", ("desc",),
           use="wrapped: replays the graph that the step asks for"),
    Member("vllm.config", "VllmConfig.use_v2_model_runner", use="read"),
    Member("vllm.distributed.parallel_state", "get_tp_group", use="called: all ranks decide alike"),
    Member("vllm.vllm_flash_attn.flash_attn_interface", "flash_attn_varlen_func",
           use="its module loads the operator that decodes"),
    Member("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.do_kv_cache_update",
           ("layer", "key", "value", "kv_cache", "slot_mapping"),
           use="the host's own: it has written keys and values before the attention"),
    # The cache: layers.py, factory.py, versions.py
    *every(_SPEC, "FullAttentionSpec",
           "block_size num_kv_heads head_size head_size_v dtype sliding_window "
           "attention_chunk_size non_causal", "read"),
    Member(_LAYER, "AttentionLayerBase.get_kv_cache_spec", ("vllm_config",),
           use="called: what a layer attends to"),
    Member(_LAYER, "AttentionLayerBase.is_draft_layer", versions=">=0.31",
           use="read: the draft's layers"),
    *every(_SPEC, "", "SlidingWindowSpec MambaSpec", "known by its class"),
    Member(_BACKEND, "AttentionBackend.get_kv_cache_shape",
           ("num_blocks", "block_size", "num_kv_heads", "head_size"), "<0.29",
           use="called: whether a cache is the standard one"),
    Member(_BACKEND, "AttentionBackend.get_kv_cache_stride_order",
           ("include_num_layers_dimension",), "<0.29",
           use="called, for the warm-up"),
    Member(_BACKEND, "AttentionBackend.customize_spec", ("spec",), ">=0.29",
           use="called: whether a cache is the standard one"),
    Member("vllm.config.cache", "CacheConfig.get_resolved_kv_cache_layout", versions=">=0.29",
           use="called, for the warm-up"),
    Member(_SPEC, "KVCacheLayout.stride_order", versions=">=0.29", use="read, for the warm-up"),
    # The server's configuration: factory.py, server.py
    Member("vllm.config.vllm", "get_current_vllm_config_or_none", use="called"),
    *every("vllm.config.vllm", "VllmConfig",
           "attention_config cache_config compilation_config model_config parallel_config "
           "scheduler_config speculative_config", "read"),
    *every("vllm.config.attention", "AttentionConfig", "backend use_non_causal", "read"),
    Member("vllm.config.speculative", "SpeculativeConfig.num_speculative_tokens",
           use="read: query tokens of a verification"),
    Member("vllm.v1.worker.worker_base", "WorkerWrapperBase.execute_model",
           ("scheduler_output",), use="wrapped: accepted draft tokens, and what requests share"),
    *every(_SCHEDULED, "SchedulerOutput",
           "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
           "scheduled_spec_decode_tokens finished_req_ids preempted_req_ids", "read: the same"),
    *every(_SCHEDULED, "NewRequestData", "req_id block_ids", "read: what requests share"),
    *every(_SCHEDULED, "CachedRequestData",
           "req_ids resumed_req_ids num_computed_tokens new_block_ids", "read: the same"),
    *every("vllm.config.scheduler", "SchedulerConfig", "async_scheduling max_num_seqs",
           "read: when results are known, and the largest batch"),
    Member(_COMPILATION, "CompilationConfig.static_forward_context", use="read: all layers"),
    Member(_COMPILATION, "CompilationConfig.cudagraph_mode", use="read, and set for DEFT_VERIFY"),
    Member(_COMPILATION, "CompilationConfig.splitting_ops_contain_attention",
           use="called, for DEFT_VERIFY"),
    *every(_COMPILATION, "CUDAGraphMode", "FULL FULL_AND_PIECEWISE FULL_DECODE_ONLY",
           "read, for DEFT_VERIFY"),
    *every("vllm.config.model", "ModelConfig",
           "hf_text_config architecture rswa_window dtype max_model_len enable_sleep_mode "
           "enable_cumem_allocator", "read"),
    *every("vllm.config.parallel", "ParallelConfig",
           "tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_rank "
           "data_parallel_index rank decode_context_parallel_size prefill_context_parallel_size "
           "use_ubatching", "read"),
    Member(_DEFAULTS, "MODELS_CONFIG_MAP", use="read"),
    *(Member(_DEFAULTS, f"{name}.verify_and_update_config", ("vllm_config",), versions,
             "called, as without --attention-backend")
      for name, versions in (("Gemma4Config", ""), ("EmbeddingGemma2ModelConfig", ">=0.32"),
                             ("DiffusionGemmaModelForBlockDiffusionConfig", ""))),
    Member("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank", use="called"),
    *every("vllm.envs", "", "VLLM_BATCH_INVARIANT VLLM_LOG_STATS_INTERVAL", "read"),
)  # fmt: skip
"""Every member of vLLM that the adapter uses."""

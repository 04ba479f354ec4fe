"""Every module, class, method, parameter and field of vLLM that we use."""

from __future__ import annotations

from deft_backend.hosts.common.contract import members_of

CONTRACT = members_of(
    """
# Registration, and the backend.
vllm.v1.attention.backends.registry
    register_backend(backend, class_path)
    AttentionBackendEnum.{CUSTOM CPU_ATTN is_overridden}
    AttentionBackendEnum.register | >=0.32 | tells that new names are accepted
vllm.platforms.interface
    Platform.is_cpu
    Platform.get_attn_backend_cls(selected_backend, attn_selector_config)
vllm.utils.import_utils
    resolve_obj_by_qualname
vllm.v1.attention.selector
    AttentionSelectorConfig(head_size, dtype, kv_cache_dtype, block_size, attn_type,
        use_non_causal)
vllm.v1.attention.backend
    AttentionBackend.validate_configuration(device_capability, attn_type)
    AttentionBackend.{full_cls_name get_impl_cls get_builder_cls get_name is_mla is_sparse is_ssm
        forward_includes_kv_cache_update}

# The metadata builder, and mixed steps.
vllm.v1.attention.backend
    AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
    AttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build)
    AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata)
    AttentionMetadataBuilder.build_for_drafting(common_attn_metadata, draft_index)
    AttentionMetadataBuilder.update_block_table(metadata, blk_table, slot_mapping)
    AttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
    AttentionMetadataBuilder.use_cascade_attention(common_prefix_len, query_lens) | <0.32
    AttentionMetadataBuilder.reorder_batch_threshold | set: model runner V1 puts decode rows first
    AttentionCGSupport.{UNIFORM_BATCH NEVER}
    CommonAttentionMetadata.{num_reqs num_actual_tokens max_query_len causal is_prefilling
        mm_req_doc_ranges seq_lens block_table_tensor query_start_loc query_start_loc_cpu
        seq_lens_cpu_upper_bound replace}
vllm.v1.worker.ubatch_utils
    UBatchSlice(request_slice, token_slice)
    _make_metadata_with_slice(ubatch_slice, attn_metadata)
vllm.v1.attention.backends.flashinfer
    FlashInferMetadataBuilder.{set_workspace_buffer _get_workspace_buffer}

# The implementations.
vllm.v1.attention.backend
    AttentionImpl(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
        kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name)
    AttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output)
    MLAAttentionImpl(q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim,
        v_head_dim, kv_b_proj)
    MLAAttentionImpl.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
    AttentionImplBase.need_to_return_lse_for_decode
vllm.v1.worker.gpu.cudagraph_utils
    ModelCudaGraphManager.capture(model)
    ModelCudaGraphManager.run_fullgraph(desc)
    ModelCudaGraphManager.dispatch(num_reqs, num_tokens, uniform_token_count) | >=0.33
    BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs) | >=0.33
vllm.distributed.parallel_state
    {get_tp_group get_tensor_model_parallel_rank}
vllm.vllm_flash_attn.flash_attn_interface
    flash_attn_varlen_func | its module loads the operator that decodes
vllm.v1.attention.backends.flash_attn
    FlashAttentionImpl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping) | it has
        written keys and values before the attention
    FlashAttentionMetadataBuilder.{aot_schedule max_cudagraph_size} | >=0.33 | FlashAttention-3

# The cache.
vllm.v1.kv_cache_interface
    FullAttentionSpec.{block_size num_kv_heads head_size head_size_v dtype sliding_window
        attention_chunk_size non_causal}
    {MLAAttentionSpec.cache_dtype_str SlidingWindowSpec MambaSpec}
    KVCacheLayout.stride_order | >=0.29
vllm.model_executor.layers.attention_layer_base
    AttentionLayerBase.get_kv_cache_spec(vllm_config)
    AttentionLayerBase.is_draft_layer | >=0.31
vllm.v1.attention.backend
    AttentionBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size) | <0.29
    AttentionBackend.get_kv_cache_stride_order(include_num_layers_dimension) | <0.29
    AttentionBackend.customize_spec(spec) | >=0.29 | tells whether a cache is the standard one
vllm.config.cache
    CacheConfig.get_resolved_kv_cache_layout | >=0.29
    CacheConfig.kv_sharing_fast_prefill

# The server's configuration, and what its scheduler tells.
vllm.config.vllm
    get_current_vllm_config_or_none
    VllmConfig.{attention_config cache_config compilation_config kv_transfer_config lora_config
        model_config parallel_config scheduler_config speculative_config use_v2_model_runner}
vllm.config.attention
    AttentionConfig.{backend use_non_causal}
vllm.config.speculative
    SpeculativeConfig.num_speculative_tokens
vllm.v1.worker.worker_base
    WorkerWrapperBase.execute_model(scheduler_output)
vllm.v1.core.sched.output
    SchedulerOutput.{scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
        finished_req_ids preempted_req_ids}
    NewRequestData.{req_id block_ids}
    CachedRequestData.{req_ids resumed_req_ids new_block_ids}
vllm.config.scheduler
    SchedulerConfig.max_num_seqs
vllm.config.compilation
    CompilationConfig.{static_forward_context cudagraph_mode splitting_ops_contain_attention}
    CUDAGraphMode.{FULL FULL_AND_PIECEWISE FULL_DECODE_ONLY PIECEWISE}
vllm.config.model
    ModelConfig.{hf_text_config architecture rswa_window dtype max_model_len enable_sleep_mode
        enable_cumem_allocator is_multimodal_model enable_prompt_embeds}
vllm.config.parallel
    ParallelConfig.{tensor_parallel_size pipeline_parallel_size data_parallel_size
        data_parallel_rank data_parallel_index rank decode_context_parallel_size
        prefill_context_parallel_size use_ubatching}
vllm.model_executor.models.config
    MODELS_CONFIG_MAP
    Gemma4Config.verify_and_update_config(vllm_config)
    EmbeddingGemma2ModelConfig.verify_and_update_config(vllm_config) | >=0.32
    DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config)
vllm.envs
    {VLLM_BATCH_INVARIANT VLLM_LOG_STATS_INTERVAL}
"""
)

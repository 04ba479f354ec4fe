"""Every module, class, method, parameter and field of vLLM that we use."""

from __future__ import annotations

from deft_backend.hosts.common.contract import members_of

OWN_NAME_SINCE = "0.32"  # the first version in which plugins may add backend names

CONTRACT = members_of(
    """
# Registration: plugin.py
vllm.v1.attention.backends.registry
    register_backend(backend, class_path) | called, for each name
    AttentionBackendEnum.CUSTOM | registered: our name in every version
    AttentionBackendEnum.register | >=0.32 | looked for: new names are accepted
    AttentionBackendEnum.CPU_ATTN | looked for: the CPU's only backend
    AttentionBackendEnum.is_overridden | called, on the CPU
    AttentionBackendEnum.{FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION} | surrounded
    AttentionBackendEnum.{TRITON_FLASH_ATTN TRITON_FLASHINFER} | >=0.30 | made of two others:
        surrounded
vllm.platforms.interface
    Platform.is_cpu | called
    Platform.get_attn_backend_cls(selected_backend, attn_selector_config) | called, for the host's
        own choice
vllm.utils.import_utils
    resolve_obj_by_qualname | called, for that class
vllm.v1.attention.selector
    AttentionSelectorConfig(head_size, dtype, kv_cache_dtype, block_size, attn_type,
        use_non_causal) | made again from what the host asks with

# The backend: registered.py, backend.py
vllm.v1.attention.backend
    AttentionBackend.validate_configuration(device_capability, attn_type) | overridden: where the
        host's choice is made
    AttentionBackend.full_cls_name | overridden: names the class
    AttentionBackend.{get_impl_cls get_builder_cls} | called, and overridden
    AttentionBackend.{get_name is_mla is_sparse is_ssm} | called
    AttentionBackend.forward_includes_kv_cache_update | read

# The metadata builder: builder.py, content.py
vllm.v1.attention.backend
    AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device) | overridden
    AttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata, fast_build) |
        overridden
    AttentionMetadataBuilder.build_for_cudagraph_capture(common_attn_metadata) | overridden: such
        a batch is no step
    AttentionMetadataBuilder.build_for_drafting(common_attn_metadata, draft_index) | overridden:
        drafts are the host's
    AttentionMetadataBuilder.update_block_table(metadata, blk_table, slot_mapping) | overridden
    AttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec) | overridden:
        uniform batches at most
    AttentionMetadataBuilder.use_cascade_attention(common_prefix_len, query_lens) | <0.32 |
        overridden
    AttentionCGSupport.{UNIFORM_BATCH NEVER} | read
    CommonAttentionMetadata.{num_reqs num_actual_tokens max_query_len causal is_prefilling
        mm_req_doc_ranges} | read: whether tree attention computes the batch
    CommonAttentionMetadata.{seq_lens block_table_tensor query_start_loc} | read: planned from, on
        the device
    CommonAttentionMetadata.{query_start_loc_cpu seq_lens_cpu_upper_bound} | read: verified
        tokens, and bytes that the host's kernel reads

# Mixed steps: content.py, builder.py
vllm.v1.worker.ubatch_utils
    UBatchSlice(request_slice, token_slice) | made: a part of a batch
    _make_metadata_with_slice(ubatch_slice, attn_metadata) | called, for the rest of a mixed step
vllm.v1.attention.backend
    AttentionMetadataBuilder.reorder_batch_threshold | set, so that model runner V1 puts decode
        rows first
vllm.v1.attention.backends.flashinfer
    FlashInferMetadataBuilder.{set_workspace_buffer _get_workspace_buffer} | looked for: the two
        builders of a mixed step share the workspace

# The implementation: backend.py, layers.py
vllm.v1.attention.backend
    AttentionImpl(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
        kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name) | overridden:
        what a layer needs is read from its arguments
    AttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output) | overridden:
        where decode runs

# Multi-head latent attention: latent.py, backend.py
vllm.v1.attention.backend
    MLAAttentionImpl(q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim,
        v_head_dim, kv_b_proj) | overridden: what a layer needs is read
    MLAAttentionImpl.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer) | overridden: where
        decode runs
    AttentionImplBase.need_to_return_lse_for_decode | read
vllm.v1.kv_cache_interface
    MLAAttentionSpec.cache_dtype_str | read
vllm.v1.worker.gpu.cudagraph_utils
    ModelCudaGraphManager.capture(model) | wrapped: captures a second set of graphs
    ModelCudaGraphManager.run_fullgraph(desc) | wrapped: replays the graph that the step asks for
vllm.config
    VllmConfig.use_v2_model_runner | read
vllm.distributed.parallel_state
    get_tp_group | called: all ranks decide alike
vllm.vllm_flash_attn.flash_attn_interface
    flash_attn_varlen_func | its module loads the operator that decodes
vllm.v1.attention.backends.flash_attn
    FlashAttentionImpl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping) | the host's
        own: it has written keys and values before the attention

# The cache: layers.py, factory.py, versions.py
vllm.v1.kv_cache_interface
    FullAttentionSpec.{block_size num_kv_heads head_size head_size_v dtype sliding_window
        attention_chunk_size non_causal} | read
vllm.model_executor.layers.attention_layer_base
    AttentionLayerBase.get_kv_cache_spec(vllm_config) | called: what a layer attends to
    AttentionLayerBase.is_draft_layer | >=0.31 | read: the draft's layers
vllm.v1.kv_cache_interface
    {SlidingWindowSpec MambaSpec} | known by its class
vllm.v1.attention.backend
    AttentionBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size) | <0.29 |
        called: whether a cache is the standard one
    AttentionBackend.get_kv_cache_stride_order(include_num_layers_dimension) | <0.29 | called, for
        the warm-up
    AttentionBackend.customize_spec(spec) | >=0.29 | called: whether a cache is the standard one
vllm.config.cache
    CacheConfig.get_resolved_kv_cache_layout | >=0.29 | called, for the warm-up
vllm.v1.kv_cache_interface
    KVCacheLayout.stride_order | >=0.29 | read, for the warm-up

# The server's configuration: factory.py, server.py
vllm.config.vllm
    get_current_vllm_config_or_none | called
    VllmConfig.{attention_config cache_config compilation_config model_config parallel_config
        scheduler_config speculative_config} | read
vllm.config.attention
    AttentionConfig.{backend use_non_causal} | read
vllm.config.speculative
    SpeculativeConfig.num_speculative_tokens | read: query tokens of a verification
vllm.v1.worker.worker_base
    WorkerWrapperBase.execute_model(scheduler_output) | wrapped: what requests share
vllm.v1.core.sched.output
    SchedulerOutput.{scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
        finished_req_ids preempted_req_ids} | read: the same
    NewRequestData.{req_id block_ids} | read: the same
    CachedRequestData.{req_ids resumed_req_ids new_block_ids} | read: the same
vllm.config.scheduler
    SchedulerConfig.max_num_seqs | read: the largest batch
vllm.config.compilation
    CompilationConfig.static_forward_context | read: all layers
    CompilationConfig.cudagraph_mode | read, and set for DEFT_VERIFY
    CompilationConfig.splitting_ops_contain_attention | called, for DEFT_VERIFY
    CUDAGraphMode.{FULL FULL_AND_PIECEWISE FULL_DECODE_ONLY PIECEWISE} | read, for DEFT_VERIFY
vllm.config.model
    ModelConfig.{hf_text_config architecture rswa_window dtype max_model_len enable_sleep_mode
        enable_cumem_allocator} | read
vllm.config.parallel
    ParallelConfig.{tensor_parallel_size pipeline_parallel_size data_parallel_size
        data_parallel_rank data_parallel_index rank decode_context_parallel_size
        prefill_context_parallel_size use_ubatching} | read
vllm.model_executor.models.config
    MODELS_CONFIG_MAP | read
    Gemma4Config.verify_and_update_config(vllm_config) | called, as without --attention-backend
    EmbeddingGemma2ModelConfig.verify_and_update_config(vllm_config) | >=0.32 | called, as without
        --attention-backend
    DiffusionGemmaModelForBlockDiffusionConfig.verify_and_update_config(vllm_config) | called, as
        without --attention-backend
vllm.distributed.parallel_state
    get_tensor_model_parallel_rank | called
vllm.envs
    {VLLM_BATCH_INVARIANT VLLM_LOG_STATS_INTERVAL} | read
"""
)
"""Every member of vLLM that we use."""

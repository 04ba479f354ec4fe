"""Every module, class, method, parameter and field of SGLang that we use."""

from __future__ import annotations

from deft_backend.hosts.common.contract import members_of

CONTRACT = members_of(
    """
# The plugin and the arguments.
sglang.srt.plugins.hook_registry
    HookRegistry.register(target, hook, hook_type) | put hooks in
    HookType.AROUND | the kind of our hooks
sglang.srt.server_args
    ServerArgs.__post_init__ | <0.5.19 | hooked: arguments resolve
    ServerArgs.resolve_once | >=0.5.19 | hooked: arguments resolve
    add_attention_backend_choices | called: add the choice deft
    ATTENTION_BACKEND_CHOICES | read: is the choice there
    ServerArgs.{get_attention_backends use_mla_backend get_model_config} | <0.5.19 | called
sglang.srt.arg_groups.model_override_base
    resolved_view(server_args) | >=0.5.19 | called: read decisions
    attention_backends_of(cfg) | >=0.5.19 | called
    use_mla_backend(server_args) | >=0.5.19 | called
    model_config_of(server_args) | >=0.5.19 | called
sglang.srt.arg_groups.overrides
    {attention_backends_of use_mla_backend model_config_of} | >=0.5.19 | imported from there
    declare_resolution(server_args, source) | >=0.5.19 | called: turn decode graphs off
sglang.srt.model_executor.cuda_graph_config
    CudaGraphConfig.decode | read and written: the kind of decode graphs
    PhaseConfig.backend | read and written: the kind of decode graphs
sglang.srt.environ
    envs | read: settings that change graphs and memory
sglang.srt.configs.model_config
    ModelConfig.{is_encoder_decoder num_attention_heads} | read: what the model is

# Backends.
sglang.srt.layers.attention.attention_registry
    ATTENTION_BACKENDS | read: the backends to surround
    register_attention_backend(name) | called: surround backends
sglang.srt.runtime_context
    attention_backends | >=0.5.18 | hooked: backends are built
sglang.srt.layers.attention.base_attn_backend
    AttentionBackend.init_forward_metadata(forward_batch) | overridden: an eager step begins
    AttentionBackend.init_forward_metadata_out_graph(forward_batch, in_capture) | overridden: a
        capture or a replay begins
    AttentionBackend.init_forward_metadata_in_graph(forward_batch) | overridden: launches of the
        graph
    AttentionBackend.forward(q, k, v, layer, forward_batch, save_kv_cache) | overridden
    AttentionBackend.forward_decode(q, k, v, layer, forward_batch, save_kv_cache) | overridden
    AttentionBackend.forward_extend | overridden
    AttentionBackend.shared_read_ends(fm) | >=0.5.18 | overridden: page tables are read until the
        forward ends
    AttentionBackend.resolve_prefill_shared_read_ends(forward_batch) | >=0.5.23 | overridden: the
        same for mixed steps
    SharedReadEnds.UNKNOWN | >=0.5.18 | our answer there
    SharedReadEnds.PRE_REPLAY | >=0.5.23 | looked for: the host still distinguishes earlier ends
        from our answer
sglang.srt.model_executor.model_runner
    ModelRunner.shared_read_done_event | >=0.5.23 | looked for: one event still tells when page
        tables may be written
sglang.srt.layers.radix_attention
    RadixAttention.{layer_id tp_q_head_num tp_k_head_num tp_v_head_num qk_head_dim v_head_dim
        scaling logit_cap logit_capping_method sliding_window_size is_cross_attention attn_type
        use_irope pos_encoding_mode xai_temperature_len} | read: what a layer computes

# Batches, requests and prefix caches.
sglang.srt.model_executor.forward_batch_info
    ForwardBatch.init_new(batch, model_runner) | wrapped: see requests
    ForwardBatch.{forward_mode batch_size rids req_pool_indices seq_lens seq_lens_cpu seq_lens_sum
        out_cache_loc spec_info extend_seq_lens extend_seq_lens_cpu mm_inputs encoder_lens
        attn_cp_metadata tbo_children global_num_tokens_cpu} | read: the batch
    ForwardMode.{is_decode is_mixed is_target_verify} | called

# Speculation.
sglang.srt.layers.attention.base_attn_backend
    AttentionBackend.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs) |
        overridden: the links are complete
sglang.srt.speculative.eagle_info
    EagleVerifyInput.{topk draft_token_num retrieve_next_token retrieve_next_sibling} | read: what
        a step verifies
sglang.srt.speculative.ngram_info
    NgramVerifyInput.{draft_token_num retrieve_next_token retrieve_next_sibling} | read: what a
        step verifies
sglang.srt.managers.schedule_batch
    ScheduleBatch.{reqs tree_cache decoding_reqs} | read: the requests
    Req.last_node | read: the node of a request
    Req.{spec_verify_ct spec_num_correct_drafts} | read: accepted drafts
    Req.{origin_input_ids tokenizer} | read: is it the host's own warm-up
    Req.seqlen | read: tokens of a batch that may share little
    Req.{req_pool_idx cache_protected_len} | <0.5.19 | read: row and tokens
    Req.kv | >=0.5.19 | read: row and tokens
    ReqKvInfo.{req_pool_idx cache_protected_len} | >=0.5.19 | read: row and tokens
sglang.srt.mem_cache.radix_cache
    RadixCache | known by its name: a tree
    TreeNode.{id parent key} | read: a node
sglang.srt.mem_cache.chunk_cache
    ChunkCache | <0.5.22 | known by its name: no tree
sglang.srt.mem_cache.unified_radix_cache
    UnifiedRadixCache.{tree_core tree_components} | >=0.5.22 | read: the unified tree
sglang.srt.mem_cache.unified_cache.unified_tree_core_interface
    UnifiedTreeCoreInterface.collect_path_info(end_node_ids) | >=0.5.22 | called: the nodes above
        each request
    TreePathNodeInfo.{node_id path_start path_end full_value_len} | >=0.5.22 | read: a node

# The model runner, its pools and its ranks.
sglang.srt.model_executor.model_runner
    ModelRunner.{server_args device dtype kv_cache_dtype model model_config is_draft_worker gpu_id
        req_to_token_pool token_to_kv_pool} | read: the model and
        where it runs
    ModelRunner._decode_cuda_graph_runner_cls | >=0.5.19 | called: the class of its graph runner,
        where it has this method
    ModelRunner.ps | <0.5.21 | read: ranks
    ModelRunner.tp_group | <0.5.22 | read: ranks that must agree
sglang.srt.runtime_context
    get_parallel | called: ranks
sglang.srt.mem_cache.memory_pool
    MHATokenToKVPool | known by its name: the one pool that we read
sglang.srt.mem_cache.swa_memory_pool
    SWAKVPool.{full_kv_pool layers_mapping} | read: the layers without sliding windows
sglang.srt.mem_cache.memory_pool
    HybridLinearKVPool.{full_kv_pool full_attention_layer_id_mapping} | read: the layers that are
        not linear
    HybridReqToTokenPool.mamba_map | read: the layers that are linear
    MHATokenToKVPool.get_key_buffer(layer_id) | called
    MHATokenToKVPool.get_value_buffer(layer_id) | called
    MHATokenToKVPool.set_kv_buffer(layer, loc_info, cache_k, cache_v) | called: write a token's
        keys and values
    MHATokenToKVPool.{start_layer layer_num store_dtype kv_cache_layout use_hnd} | read: the KV
        cache
    KVWriteLoc(loc, swa_loc) | made: where a token is written
    ReqToTokenPool.{req_to_token size} | read: the page table

# Multi-head latent attention.
sglang.srt.mem_cache.memory_pool
    MLATokenToKVPool | known by its name: the pool of latent vectors
    MLATokenToKVPool.get_key_buffer(layer_id) | called
    MLATokenToKVPool.set_mla_kv_buffer(layer, cache_k_nope, cache_k_rope) | called: write a
        token's latent vector
    MLATokenToKVPool.store_dtype | read: the KV cache
sglang.srt.configs.model_config
    ModelConfig.hf_text_config | read: is the attention sparse

# Decode CUDA graphs and the fence.
sglang.srt.model_executor.runner.decode_cuda_graph_runner
    DecodeCudaGraphRunner.capture_one_shape(size, forward, stream_idx, variant_label) | wrapped:
        the second set
    DecodeCudaGraphRunner._resolve_lora_variant(forward_batch) | wrapped: choose between the sets
    DecodeCudaGraphRunner.execute(forward_batch, pp_proxy_tensors) | <0.5.18 | wrapped: the fence
    DecodeCudaGraphRunner.model_runner | read: whose graphs they are
sglang.srt.model_executor.model_runner
    ModelRunner.war_fastpath_read_done_event | <0.5.18 | written: the fence
sglang.srt.managers.scheduler
    Scheduler._apply_war_barrier | looked for: page-table writes wait for the forward
"""
)
"""Every member of SGLang that we use."""

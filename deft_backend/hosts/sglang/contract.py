"""Every module, class, method, parameter and field of SGLang that we use."""

from __future__ import annotations

from deft_backend.hosts.common.contract import members_of

CONTRACT = members_of(
    """
# The plugin and the arguments.
sglang.srt.plugins.hook_registry
    HookRegistry.register(target, hook, hook_type)
    HookType.AROUND
sglang.srt.server_args
    ServerArgs.{__post_init__ get_attention_backends use_mla_backend get_model_config} | <0.5.19
    ServerArgs.resolve_once | >=0.5.19
    {add_attention_backend_choices ATTENTION_BACKEND_CHOICES}
sglang.srt.arg_groups.model_override_base
    resolved_view(server_args) | >=0.5.19
    attention_backends_of(cfg) | >=0.5.19
    use_mla_backend(server_args) | >=0.5.19
    model_config_of(server_args) | >=0.5.19
sglang.srt.arg_groups.overrides
    {attention_backends_of use_mla_backend model_config_of} | >=0.5.19
    declare_resolution(server_args, source) | >=0.5.19
sglang.srt.model_executor.cuda_graph_config
    {CudaGraphConfig.decode PhaseConfig.backend}
sglang.srt.environ
    envs
sglang.srt.configs.model_config
    ModelConfig.{is_encoder_decoder num_attention_heads hf_text_config}

# Backends.
sglang.srt.layers.attention.attention_registry
    ATTENTION_BACKENDS
    register_attention_backend(name)
sglang.srt.runtime_context
    get_parallel
sglang.srt.layers.attention.base_attn_backend
    AttentionBackend.init_forward_metadata(forward_batch)
    AttentionBackend.init_forward_metadata_out_graph(forward_batch, in_capture)
    AttentionBackend.init_forward_metadata_in_graph(forward_batch)
    AttentionBackend.forward(q, k, v, layer, forward_batch, save_kv_cache)
    AttentionBackend.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
    AttentionBackend.forward_extend
    AttentionBackend.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)
    AttentionBackend.shared_read_ends(fm) | >=0.5.18
    AttentionBackend.resolve_prefill_shared_read_ends(forward_batch) | >=0.5.23
    SharedReadEnds.UNKNOWN | >=0.5.18 | our answer: page tables are read until the forward ends
    SharedReadEnds.PRE_REPLAY | >=0.5.23 | the host still tells earlier ends from our answer
sglang.srt.model_executor.model_runner
    ModelRunner.shared_read_done_event | >=0.5.23 | one event tells when tables may be written
sglang.srt.layers.radix_attention
    RadixAttention.{layer_id tp_q_head_num tp_k_head_num tp_v_head_num qk_head_dim v_head_dim}
    RadixAttention.{scaling logit_cap logit_capping_method sliding_window_size is_cross_attention}
    RadixAttention.{attn_type use_irope pos_encoding_mode xai_temperature_len}

# Batches, requests and prefix caches.
sglang.srt.model_executor.forward_batch_info
    ForwardBatch.init_new(batch, model_runner)
    ForwardBatch.{forward_mode batch_size rids req_pool_indices seq_lens seq_lens_cpu seq_lens_sum}
    ForwardBatch.{out_cache_loc spec_info extend_seq_lens extend_seq_lens_cpu mm_inputs}
    ForwardBatch.{encoder_lens attn_cp_metadata tbo_children global_num_tokens_cpu}
    ForwardMode.{is_decode is_mixed is_target_verify}
sglang.srt.speculative.eagle_info
    EagleVerifyInput.{topk draft_token_num retrieve_next_token retrieve_next_sibling}
sglang.srt.speculative.dflash_info
    DFlashVerifyInput.{topk draft_token_num custom_mask ragged_verify_layout} | >=0.5.23
sglang.srt.speculative.ngram_info
    NgramVerifyInput.{draft_token_num retrieve_next_token retrieve_next_sibling}
sglang.srt.managers.schedule_batch
    ScheduleBatch.{reqs tree_cache decoding_reqs}
    Req.{last_node seqlen origin_input_ids tokenizer}
    Req.{req_pool_idx cache_protected_len} | <0.5.19
    Req.kv | >=0.5.19
    ReqKvInfo.{req_pool_idx cache_protected_len} | >=0.5.19
sglang.srt.mem_cache.radix_cache
    RadixCache
    TreeNode.{id parent key}
sglang.srt.mem_cache.chunk_cache
    ChunkCache | <0.5.22
sglang.srt.mem_cache.unified_radix_cache
    UnifiedRadixCache.{tree_core tree_components} | >=0.5.22
sglang.srt.mem_cache.unified_cache.unified_tree_core_interface
    UnifiedTreeCoreInterface.collect_path_info(end_node_ids) | >=0.5.22
    TreePathNodeInfo.{node_id path_start path_end full_value_len} | >=0.5.22

# The model runner, its pools and its ranks.
sglang.srt.model_executor.model_runner
    ModelRunner.{server_args device dtype kv_cache_dtype model model_config is_draft_worker gpu_id}
    ModelRunner.{req_to_token_pool token_to_kv_pool}
    ModelRunner._decode_cuda_graph_runner_cls | >=0.5.19
    ModelRunner.ps | <0.5.21
    ModelRunner.tp_group | <0.5.22
sglang.srt.mem_cache.swa_memory_pool
    SWAKVPool.{full_kv_pool layers_mapping}
sglang.srt.mem_cache.memory_pool
    HybridLinearKVPool.{full_kv_pool full_attention_layer_id_mapping}
    HybridReqToTokenPool.mamba_map
    MHATokenToKVPool
    MHATokenToKVPool.get_key_buffer(layer_id)
    MHATokenToKVPool.get_value_buffer(layer_id)
    MHATokenToKVPool.set_kv_buffer(layer, loc_info, cache_k, cache_v)
    MHATokenToKVPool.{start_layer layer_num store_dtype kv_cache_layout use_hnd}
    KVWriteLoc(loc, swa_loc)
    ReqToTokenPool.{req_to_token size}
    MLATokenToKVPool
    MLATokenToKVPool.get_key_buffer(layer_id)
    MLATokenToKVPool.set_mla_kv_buffer(layer, cache_k_nope, cache_k_rope)
    MLATokenToKVPool.store_dtype

# Decode CUDA graphs and the fence.
sglang.srt.model_executor.runner.decode_cuda_graph_runner
    DecodeCudaGraphRunner.capture_one_shape(size, forward, stream_idx, variant_label)
    DecodeCudaGraphRunner._resolve_lora_variant(forward_batch)
    DecodeCudaGraphRunner.execute(forward_batch, pp_proxy_tensors) | <0.5.18
    DecodeCudaGraphRunner.model_runner
sglang.srt.model_executor.model_runner
    ModelRunner.war_fastpath_read_done_event | <0.5.18
sglang.srt.managers.scheduler
    Scheduler._apply_war_barrier | page-table writes still wait for the forward
"""
)

"""The metadata builder: it attaches steps of tree attention to the host's metadata."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any, ClassVar, cast

import torch

from deft_backend.hosts.common.contract import matches
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.vllm.content import (
    DOCUMENTS,
    Content,
    GraphBatches,
    build_rest,
    content_of,
    leading_rows,
    prefills,
    sees_later_tokens,
    unsplit,
)
from deft_backend.hosts.vllm.factory import (
    LayerGroup,
    can_sleep,
    create_group,
    log,
    outside_memory_pools,
    unsupported_server,
)
from deft_backend.hosts.vllm.group import GroupAttention, TreeGroup
from deft_backend.hosts.vllm.layers import divide_layers
from deft_backend.hosts.vllm.server import server_of, shares_graphs
from deft_backend.hosts.vllm.step import Picked, TreeStep, step_of
from deft_backend.hosts.vllm.versions import VLLM
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import DECODE, MIXED, VERIFICATION
from deft_patches.vllm import left_graphs

logger = logging.getLogger("deft_backend")

TRIED_HEAD_DIMS = (128,)  # whose graphs of whole steps were tried on a GPU
USUAL_GRAPHS = [1, 2, 4, *range(8, 256, 8), *range(256, 512 + 1, 16)]
LARGER_GRAPHS = range(528, 1280 + 1, 16)
"""Tokens of vLLM's graphs on Hopper GPUs by default, and of more graphs of whole steps. These spare
Python the launches of larger steps with prefills, which take it longer than the GPU."""
SPLIT_REQUESTS = 992  # most of a batch in which FlashAttention-3 splits KV, for rows that decode


class TreeBuilder:
    """Placed before a host's ``AttentionMetadataBuilder`` class; reads no device memory."""

    host: ClassVar[Any]  # the host's backend that tree attention surrounds

    deft_group: GroupAttention | None
    deft_rest: Any = None  # the host's builder for mixed steps, if these may be split
    deft_batches: GraphBatches | None = None  # for graphs that hold both attentions
    reorder_batch_threshold: int | None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self._host().__init__(kv_cache_spec, layer_names, vllm_config, device)
        device = torch.device(device)
        layers = LayerGroup(self.host, kv_cache_spec, layer_names, vllm_config, device)
        group = self.deft_group = create_group(layers)
        # FLASH_ATTN's builder schedules ahead for FlashAttention-3, and for no other version.
        if group is not None and getattr(self, "aot_schedule", False):
            self.deft_batches = shared_graphs(layers, group)
        if self.deft_batches is not None:
            cast(Any, self).max_cudagraph_size = server_of(vllm_config).usual_graph
        if group is not None and group.prefixes is not None:
            make = self.host.get_builder_cls()
            self.deft_rest = make(kv_cache_spec, layer_names, vllm_config, device)
            self.deft_rest.max_cudagraph_size = 0  # FLASH_ATTN: no graph holds these batches
            if self.reorder_batch_threshold is None:  # decode rows first, in model runner V1
                self.reorder_batch_threshold = group.query_tokens

    def _host(self) -> Any:
        return cast(Any, super())

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """At most ``UNIFORM_BATCH`` if tree attention may decode: vLLM would replay a graph for
        mixed batches for other kinds of batches. Graphs that hold both attentions serve them all.
        Under ``DEFT_VERIFY``, which compares results, no graph. Neither in batch-invariant mode:
        vLLM replays a graph of decode steps also if a request has a prompt's last token to compute.
        """
        from vllm import envs
        from vllm.v1.attention.backend import AttentionCGSupport

        support = cast(Any, super()).get_cudagraph_support(vllm_config, kv_cache_spec)
        if unsupported_server(vllm_config) is not None or shares_graphs(vllm_config):
            return support
        eager = Settings.from_env().verify or envs.VLLM_BATCH_INVARIANT
        if eager and support is not AttentionCGSupport.NEVER:
            leave_full_graphs(vllm_config.compilation_config)
            return AttentionCGSupport.NEVER
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        common = common_attn_metadata
        if self._in_shared_graph(common_prefix_len, common):
            return self._build_for_shared_graph(common, *args, **kwargs)
        metadata = self._host().build(common_prefix_len, common, *args, **kwargs)
        self._attach(metadata, common_prefix_len, common, *args, **kwargs)
        return metadata

    def _in_shared_graph(self, common_prefix_len: int, common: Any) -> bool:
        """Whether graphs of this size hold both attentions."""
        if self.deft_group is None or self.deft_batches is None or common_prefix_len:
            return False
        size = int(common.num_reqs), int(common.num_actual_tokens)
        if self._capturing:
            self.deft_batches.sizes.add(size)
            return True
        left, self.deft_batches.left = self.deft_batches.left, False  # a rule speaks of one step
        return size in self.deft_batches.sizes and not left

    def _build_for_shared_graph(self, common: Any, *args: Any, **kwargs: Any) -> Any:
        """Metadata of the rows that tree attention leaves, with the step of the others."""
        group = cast(GroupAttention, self.deft_group)
        # The host captures for one prompt of all tokens; its schedule must be of that kernel.
        longest = int(common.num_actual_tokens)
        requests = int(common.num_reqs)
        rows, decoded = (0, None) if self._capturing else leading_rows(common)
        reason = group.refuses(requests, 1)
        if reason is None and common.causal is not True:
            reason = "attention that is not causal"
        if reason is None and not rows:
            reason = "decode rows behind prefills"
        # A graph's requests are the padded ones; of these, plans hold as many as the server allows.
        # Fewer rows than DEFT_MIN_BATCH are the host's only where its kernel may split their KV.
        size = rows if requests <= SPLIT_REQUESTS else max(rows, group.settings.min_batch)
        reason = reason or refused(size, group.settings, group.attention.max_batch)
        rows = rows if reason is None else 0

        def of_host(**changes: Any) -> Any:
            batch, builder = common.replace(max_query_len=longest, **changes), cast(Any, self)
            # By this number of tokens, FLASH_ATTN's builder tells batches of graphs from others.
            usual, builder.max_cudagraph_size = builder.max_cudagraph_size, longest
            try:
                return self._host().build(0, batch, *args, **kwargs)
            finally:
                builder.max_cudagraph_size = usual

        step = None
        if requests < group.settings.min_batch:
            metadata = of_host()
        else:
            lens, starts = cast(GraphBatches, self.deft_batches).divide(common, rows)
            metadata = of_host(query_start_loc=starts)
            step = TreeStep(group, common.block_table_tensor[:requests], lens, requests)
            step.whole = cache(of_host) if rows else lambda: metadata
        if decoded is not None:
            group.count(step if rows else None, decoded, reason)
        metadata.deft_step = step
        group.current = step
        return metadata

    _capturing = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of a batch made for capture: the same, but not counted as a step."""
        self._capturing = True
        try:
            metadata = self._host().build_for_cudagraph_capture(common_attn_metadata)
            if not hasattr(metadata, "deft_step"):
                self._attach(metadata, 0, common_attn_metadata)
            return metadata
        finally:
            self._capturing = False

    def _attach(
        self, metadata: Any, common_prefix_len: int, common: Any, *args: Any, **kwargs: Any
    ) -> None:
        step, group = None, self.deft_group
        if group is None:
            metadata.deft_step = None
            return
        content = content_of(common, group.query_tokens, equal_bits=group.equal_bits)
        if content is not None:
            reason = self._refuses(group, content, common_prefix_len, common)
            if reason is None:
                step = self._tree_step(group, content, common, *args, **kwargs)
                reason = "no metadata for a part of the batch" if step is None else None
            if not self._capturing:
                group.count(step, content.decoded, reason)
        metadata.deft_step = step
        group.current = step

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        metadata = self._host().build_for_drafting(common_attn_metadata, draft_index)
        metadata.deft_step = None
        return metadata

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: Any) -> Any:
        updated = self._host().update_block_table(metadata, blk_table, slot_mapping)
        step, group, mine = step_of(metadata), self.deft_group, None
        if step is not None and group is not None and group.refuses(*step.size) is None:
            if step.rest is None:
                mine = step.with_page_table(group, blk_table, None)
            elif self.deft_rest is not None:
                rest = self.deft_rest.update_block_table(
                    step.rest, blk_table[len(step.seq_lens) :], slot_mapping[step.tokens :]
                )
                mine = step.with_page_table(group, blk_table, rest)
        updated.deft_step = mine
        return updated

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Any, *args: Any, **kwargs: Any
    ) -> bool:
        """No cascade if tree attention may compute the batch: lengths do not tell verifications
        from short ends of prompts.
        """
        group = self.deft_group
        longest = int(query_lens.max()) if len(query_lens) else 0
        fits = group is not None and 1 <= longest <= group.query_tokens
        if group is not None and fits and group.refuses(len(query_lens), longest) is None:
            return False
        return bool(
            self._host().use_cascade_attention(common_prefix_len, query_lens, *args, **kwargs)
        )

    def _tree_step(
        self, group: GroupAttention, content: Content, common: Any, *args: Any, **kwargs: Any
    ) -> TreeStep | None:
        if content.kind != MIXED:
            return tree_step(group, content, common)
        split = unsplit(content, common) is None
        rest = self._rest(content, common, *args, **kwargs) if split else None
        if rest is not None:
            return tree_step(group, content, common, rest)
        return picked_step(group, content, common) if group.equal_bits else None

    def _rest(self, content: Content, common: Any, *args: Any, **kwargs: Any) -> Any:
        if self.deft_rest is None or args or kwargs.keys() - {"fast_build"}:
            return None
        try:
            return build_rest(self.deft_rest, self, content, common, **kwargs)
        except Exception as error:
            self.deft_rest = None
            log.warn(
                f"{self.host.get_name()} made no metadata for a part of a batch ({error!r}); it "
                "computes all rows of every step with prefills"
            )
            return None

    def _refuses(
        self, group: GroupAttention, content: Content, common_prefix_len: int, common: Any
    ) -> str | None:
        if content.kind == DECODE and content.tokens != content.requests:
            return "query tokens of no request"
        query_tokens = group.query_tokens if content.verifies else 1
        reason = group.refuses(content.requests, query_tokens)
        if not group.equal_bits:  # these plan every step
            if content.kind == MIXED:
                reason = reason or unsplit(content, common)
            reason = reason or group.leaves(content, common, capturing=self._capturing)
        if reason is None and common_prefix_len:
            reason = "cascade attention"
        if reason is None and common.causal is not True:
            reason = "attention that is not causal"
        # A single token of a document has no later ones in the cache, and a draft follows its
        # request's prompt.
        if reason is None and content.kind == VERIFICATION and sees_later_tokens(common):
            reason = DOCUMENTS if prefills(common) else None
        return reason


def tree_step(group: GroupAttention, content: Content, common: Any, rest: Any = None) -> TreeStep:
    requests = content.requests
    table, lens = common.block_table_tensor[:requests], common.seq_lens[:requests]
    step = TreeStep(group, table, lens, content.tokens, rest=rest)
    if content.verifies:
        # One number of query tokens for all batches: kernels are compiled for it.
        step.query_tokens = group.query_tokens
        step.query_start = common.query_start_loc[: requests + 1]
    return step


def picked_step(group: GroupAttention, content: Content, common: Any) -> TreeStep:
    """A step of the requests that decode, each with one token, wherever they stand."""
    lens = common.seq_lens
    requests = torch.from_numpy(content.decoding).to(lens.device, non_blocking=True)
    picked = Picked(requests, common.query_start_loc[requests].long())
    table = common.block_table_tensor[requests]
    return TreeStep(group, table, lens[requests], content.tokens, picked=picked)


def leave_full_graphs(config: Any) -> None:
    """Ask for graphs without attention. vLLM would end on ``FULL`` with a backend that has no
    graphs, and would drop all graphs where it breaks them at attention without compiling.
    """
    from vllm.config import CUDAGraphMode

    graphs = config.cudagraph_mode
    if graphs in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE):
        pieces = config.splitting_ops_contain_attention() or graphs != CUDAGraphMode.FULL
        config.cudagraph_mode = CUDAGraphMode["PIECEWISE" if pieces else "FULL_DECODE_ONLY"]


def shared_graphs(layers: LayerGroup, group: GroupAttention) -> GraphBatches | None:
    """Ask vLLM for graphs of all steps, if they may hold both attentions. By default, it has
    piecewise graphs of steps that prefill, and Python launches their attention layer by layer.
    """
    from vllm.config import CUDAGraphMode

    config, server = layers.vllm_config, server_of(layers.vllm_config)
    division, most = divide_layers(config), config.scheduler_config.max_num_seqs
    alone = not division.host and set(division.tree) == set(layers.layer_names)
    tried = group.shape.head_dim in TRIED_HEAD_DIMS and group.kv_dtype == group.dtype
    fits = most <= group.attention.max_batch
    server.shares_graphs = alone and tried and fits and may_share_graphs(layers.host, config)
    if not server.shares_graphs:
        return None
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    group.attention.skips_empty = True  # the host computes these rows, or they are padding
    if server.usual_graph is None:
        server.usual_graph = config.compilation_config.max_cudagraph_capture_size or 0
    usual, largest = server.usual_graph, largest_graph(config)
    logger.info("deft: CUDA graphs of all steps up to %d tokens, with prefills too (FULL)", largest)
    make = partial(GraphBatches, most, layers.device)
    batches = outside_memory_pools(make, layers.device) if can_sleep(config) else make()

    def leaves(tokens: int, alike: int | None) -> bool:
        # Steps with prefills that vLLM alone runs without a graph run so if requests share too
        # little: two gaps between tokens then share the wait for a step (docs/kernel-log.md).
        prefills = alike is None and tokens > usual
        batches.left = prefills and bool(cast(TreeGroup, group).shares_too_little(prefills=False))
        return batches.left

    if largest > usual:
        left_graphs.install(config, leaves)
    return batches


def largest_graph(config: Any) -> int:
    """Tokens of the largest graph, after asking for LARGER_GRAPHS beside vLLM's usual ones."""
    graphs = config.compilation_config
    if graphs.cudagraph_capture_sizes == USUAL_GRAPHS:
        most = config.scheduler_config.max_num_batched_tokens
        sizes = [*USUAL_GRAPHS, *(size for size in LARGER_GRAPHS if size <= most)]
        graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = sizes, sizes[-1]
    return int(graphs.max_cudagraph_capture_size or 0)


def may_share_graphs(host: Any, config: Any) -> bool:
    """Whether this host's kernels skip requests without query tokens, which is known of those of
    FLASH_ATTN, in a server of a kind that was tried.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode

    full = CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE
    parallel, model = config.parallel_config, config.model_config
    ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return (
        host.get_name() == "FLASH_ATTN"
        and bool(config.use_v2_model_runner)
        and matches(VLLM.installed() or "0", ">=0.33")
        and config.compilation_config.cudagraph_mode in full
        and max(*ranks, parallel.data_parallel_size) == 1
        and not any((config.speculative_config, config.lora_config, config.kv_transfer_config))
        and not (model.is_multimodal_model or model.enable_prompt_embeds)
        and not config.cache_config.kv_sharing_fast_prefill
        and not (envs.VLLM_BATCH_INVARIANT or Settings.from_env().verify)
    )

"""The metadata builder: it attaches steps of tree attention to the host's metadata."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch

from deft_backend.hosts.vllm.start.factory import LayerGroup, create_group, unsupported_server
from deft_backend.hosts.vllm.step.extends import Extends
from deft_backend.hosts.vllm.step.group import GroupAttention
from deft_backend.hosts.vllm.step.step import TreeStep, attach, is_attached, prefills, step_of
from deft_backend.hosts.vllm.versions import host_cascades
from deft_backend.settings.config import Settings


class TreeBuilder:
    """Placed before one of the host's ``AttentionMetadataBuilder`` classes; see ``backend.py``.

    Nothing here reads device memory: all decisions follow from sizes that the CPU knows.
    """

    host: ClassVar[Any]  # the host's backend that tree attention surrounds

    deft_group: GroupAttention | None
    deft_extends: Extends | None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any,
                 device: torch.device) -> None:  # fmt: skip
        self._host().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.deft_group = create_group(
            LayerGroup(self.host, kv_cache_spec, layer_names, vllm_config, torch.device(device))
        )
        self.deft_extends = None if self.deft_group is None else self.deft_group.short_extends

    def _host(self) -> Any:
        return cast(Any, super())

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """The host's level, at most ``UNIFORM_BATCH`` if tree attention may decode.

        vLLM would replay a graph for mixed batches for other kinds of batches than the captured
        one. Of uniform batches it keeps one graph for each query length. Under ``DEFT_VERIFY`` no
        graph holds attention: inside a graph results cannot be compared.
        """
        from vllm.v1.attention.backend import AttentionCGSupport

        support = cast(Any, super()).get_cudagraph_support(vllm_config, kv_cache_spec)
        if unsupported_server(vllm_config) is not None:
            return support
        if Settings.from_env().verify and support is not AttentionCGSupport.NEVER:
            leave_graphs_of_any_batch(vllm_config.compilation_config)
            return AttentionCGSupport.NEVER
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any,
              **kwargs: Any) -> Any:  # fmt: skip
        """The host's metadata, with a step attached if tree attention decodes the batch."""
        metadata = self._host().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        step, reason = self._attach(metadata, common_prefix_len, common_attn_metadata)
        if self.deft_group is not None and not self._capturing:
            self.deft_group.count(step, reason, common_attn_metadata)
        return metadata

    _capturing = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of a batch made for capture: the same, but not counted as a step.

        Most hosts call `build` for it. A builder made of two others calls one of these.
        """
        self._capturing = True
        try:
            metadata = self._host().build_for_cudagraph_capture(common_attn_metadata)
            if not is_attached(metadata):
                self._attach(metadata, 0, common_attn_metadata)
            return metadata
        finally:
            self._capturing = False

    def _attach(
        self, metadata: Any, common_prefix_len: int, common: Any
    ) -> tuple[TreeStep | None, str | None]:
        """Attach the step of a batch, if it has one; the step, or why the host decodes it."""
        step, reason = self._step(common_prefix_len, common)
        attach(metadata, step)
        if self.deft_group is not None:
            self.deft_group.current = step
        return step, reason

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        """Metadata of a draft model, which runs the host's implementation."""
        metadata = self._host().build_for_drafting(common_attn_metadata, draft_index)
        attach(metadata, None)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: Any) -> Any:
        """Another group's metadata with this group's page table and step."""
        updated = self._host().update_block_table(metadata, blk_table, slot_mapping)
        step, group = step_of(metadata), self.deft_group
        if step is not None and step.group.extends:
            group = None if self.deft_extends is None else self.deft_extends.group
        if step is not None:
            held = group is not None and group.holds(step)
            step = step.with_page_table(cast(GroupAttention, group), blk_table) if held else None
        attach(updated, step)
        return updated

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Any, *args: Any,
                              **kwargs: Any) -> bool:  # fmt: skip
        """Whether the host uses its cascade: not if tree attention may compute the batch.

        The lengths do not tell verifications from short ends of prompts. The host computes these
        without its cascade.
        """
        group = self.deft_group
        longest = int(query_lens.max()) if len(query_lens) else 0
        fits = group is not None and 1 <= longest <= group.query_tokens
        if group is not None and fits and group.refuses(len(query_lens)) is None:
            return False
        return host_cascades(self._host(), common_prefix_len, query_lens, *args, **kwargs)

    def _step(self, common_prefix_len: int, common: Any) -> tuple[TreeStep | None, str | None]:
        """The step of a batch, or why the host decodes it; two None for its prefills."""
        group = self.deft_group
        batch, longest = int(common.num_reqs), int(common.max_query_len)
        if group is None or longest < 1:
            return None, None
        several = longest > 1
        if longest > group.query_tokens or (several and not self._capturing and prefills(common)):
            extends = None if self._capturing or common_prefix_len else self.deft_extends
            return None if extends is None else extends.step(common), None
        if not several and common.num_actual_tokens != batch:
            return None, None
        reason = group.refuses(batch) or group.uneven(common)
        reason = reason or group.too_little(capturing=self._capturing)
        if reason is None and common_prefix_len:
            reason = "cascade attention"
        if reason is None and common.causal is not True:
            reason = "attention that is not causal"
        # Within documents of a multimodal prompt (`mm_req_doc_ranges`), tokens attend to later
        # tokens. Decode and verification come after the prompt, so they need no check for them.
        if reason is None and getattr(common, "dcp_local_seq_lens", None) is not None:
            reason = "attention over another range of tokens"
        if reason is not None:
            return None, reason
        step = TreeStep(
            group, common.block_table_tensor[:batch], common.seq_lens[:batch], tokens=batch
        )
        if several:  # one number of query tokens for all batches: kernels are compiled for it
            step.query_tokens = group.query_tokens
            step.query_start = common.query_start_loc[: batch + 1]
            step.tokens = int(common.num_actual_tokens)
        return step, None


def leave_graphs_of_any_batch(config: Any) -> None:
    """Change ``FULL``, graphs of all batches, to the mode with graphs of uniform batches.

    With ``FULL`` and a backend that supports no graphs, the host refuses to start. Graphs of
    uniform batches it only leaves out.
    """
    from vllm.config import CUDAGraphMode

    if config.cudagraph_mode == CUDAGraphMode.FULL:
        split = config.splitting_ops_contain_attention()
        name = "FULL_AND_PIECEWISE" if split else "FULL_DECODE_ONLY"
        config.cudagraph_mode = CUDAGraphMode[name]

"""Short extends: prefill steps of a few new tokens a request that tree attention computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.common.short_extends import ShortExtends
from deft_backend.hosts.sglang.prefixes.prefix_source import CachedTree
from deft_backend.hosts.sglang.step.kinds import StepInputs
from deft_backend.hosts.sglang.step.tree_layers import TreeLayers, TreeStep

MODES = ("EXTEND", "MIXED")
"""Prefill, alone and together with decoding requests. Other prefills are not causal chains."""

UNSUITABLE = ("encoder_lens", "attn_cp_metadata", "tbo_children", "global_num_tokens_cpu")
"""Fields of a forward batch that are None where its attention is plain and all of one rank."""


@dataclass(eq=False)
class ExtendSteps:
    """Plans a batch of short extends on the device, if its requests share enough.

    The radix tree tells what they share, so nobody waits for the device. Under a cache whose tree
    cannot be read, the host computes all prefills.
    """

    rule: ShortExtends
    layers: TreeLayers
    runner: Any  # the host's model runner
    _last: tuple[Any, Any] | None = None  # the last observed batch: its list of ids and requests
    _tree: CachedTree = field(default_factory=lambda: CachedTree("the host computes all prefills"))

    def observe(self, forward_batch: Any, batch: Any, runner: Any) -> None:
        """Observer of ``ForwardBatch.init_new``."""
        if runner is self.runner:
            extends = forward_batch.forward_mode.name.upper() in MODES
            self._last = (forward_batch.rids, batch) if extends else None

    def begin(self, forward_batch: Any) -> None:
        """Take the step that begins, whose host metadata is made, if tree attention computes it."""
        last, self._last = self._last, None
        if last is None or last[0] is None or last[0] is not forward_batch.rids:
            return
        lens = forward_batch.extend_seq_lens_cpu
        size = self.rule.size_for(max(lens)) if lens else None
        if (
            size is None
            or not self._takes(forward_batch, lens)
            or not self._saves_enough(size, forward_batch, last[1])
        ):
            return
        try:
            inputs = self._planned(size, forward_batch, sum(lens))
        except Exception as error:
            self.layers.failure.planning_failed(error)
            return
        self.layers.step = TreeStep(
            forward_batch, inputs, host_ready=True, ran=self._count,
            attention=self.rule.attention,
        )  # fmt: skip

    def _takes(self, forward_batch: Any, lens: list[int]) -> bool:
        size, most = forward_batch.batch_size, self.rule.attention.max_batch
        return (
            self.layers.failure.reason is None
            and refused(size, self.rule.settings, most) is None
            and len(lens) == len(forward_batch.seq_lens) == size
            and forward_batch.seq_lens_cpu is not None
            and all(getattr(forward_batch, name, None) is None for name in UNSUITABLE)
            and not any(getattr(forward_batch, "mm_inputs", None) or ())
        )

    def _saves_enough(self, size: int, forward_batch: Any, batch: Any) -> bool:
        """Whether the requests share enough, by the paths of the radix tree."""
        if len(batch.reqs) != forward_batch.batch_size:
            return False
        lens = forward_batch.seq_lens_cpu.numpy()
        forest = self._tree.forest(batch.tree_cache, batch.reqs, lens)
        if forest is None:
            return False
        return self.rule.saves_enough(size, forest.tokens_attended, forest.tokens_stored)

    def _planned(self, size: int, forward_batch: Any, tokens: int) -> StepInputs:
        starts = torch.nn.functional.pad(
            forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0)
        )
        inputs = StepInputs(
            forward_batch.seq_lens, forward_batch.req_pool_indices, size, query_start=starts,
            tokens=tokens,
        )  # fmt: skip
        inputs.plan(self.rule.attention, self.layers.page_table)
        return inputs

    def _count(self) -> None:
        self.layers.state.short_extends += 1

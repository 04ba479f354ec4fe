"""What the papers compare: policies with other parameters, and the kernels of their baselines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from benchmarks.kernel.methods.ours import Ours
from deft_backend import TreeAttention
from deft_backend.forest import PrefixForest
from deft_backend.planner.reference import PlanError, plan_grouping
from deft_backend.policies import POLICY_NAMES, Grouping, Policy, PolicyError, Target
from deft_backend.policies.edges import cut_ranges, grouped_ranges
from deft_backend.policies.fixed_edges import DeftNodeChunk
from deft_backend.settings.config import Settings

MOST_SCORE_BYTES = 4 << 30


class Tuned(Ours):
    """Tree attention under a policy with parameters of its own, planned by the reference.

    - `name`: the method's name in rows.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        known = policy.name in POLICY_NAMES
        super().__init__(name, policy.name if known else "deft-node")
        self._tuned = policy

    def most_requests(self, inputs: Inputs) -> int:
        """A server's capacity: fine divisions of a small batch need room for their items."""
        return max(inputs.batch, Settings().max_batch)

    def make_plan(self, attention: TreeAttention, inputs: Inputs) -> dict[str, int]:
        if inputs.query_tokens > 1:
            raise Refused("peers with plans of the reference have one query token a request")
        # Not `plan_forest`, which gives chunks no more room than such a batch usually needs.
        target = attention.target.within(attention.capacity.limits)
        try:
            plan = plan_grouping(self._tuned.group(inputs.forest, target), inputs.forest, target)
            attention.use(plan, inputs.forest)
        except (PlanError, PolicyError) as error:
            raise Refused(str(error)) from error
        return {"items": plan.num_items, "partials": plan.num_partials}


@dataclass(frozen=True)
class FixedDivision(Policy):
    """Each node's KV in the same number of chunks: FlashForge's naive division (Figure 9)."""

    chunks: int

    name: ClassVar[str] = "fixed-division"

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """As :meth:`deft_backend.policies.Policy.group`."""
        return _even(forest, self.chunks, target, cut=True)


@dataclass(frozen=True)
class WholeContext(Policy):
    """Each query alone with its whole context, undivided: the start of FlashForge's Figure 8."""

    name: ClassVar[str] = "whole-context"

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """As :meth:`deft_backend.policies.Policy.group`."""
        return _even(forest, 1, target, cut=False)


@dataclass(frozen=True)
class OneTile(Policy):
    """DeFT-Node-Chunk in large tiles alone, as in a kernel of one tile shape."""

    name: ClassVar[str] = "node-chunk-one-tile"

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """As :meth:`deft_backend.policies.Policy.group`."""
        found = DeftNodeChunk().group(forest, target)
        return replace(found, least_shape=np.ones(found.num_groups, dtype=np.int64))


def _even(forest: PrefixForest, chunks: int, target: Target, *, cut: bool) -> Grouping:
    """Nodes (`cut`) or whole contexts, each in the same number of chunks."""
    ranges = grouped_ranges(forest, np.full(forest.num_nodes, cut))
    num_chunks = np.full(len(ranges.node), chunks, dtype=np.int64)
    return cut_ranges(ranges, forest.is_leaf, num_chunks, target.block_tokens)


class DenseMask(Method):
    """Tree attention as Medusa computes it: dense products, a dense mask, and nothing fused.

    Keys and values lie in one unpaged buffer, in the order of the flattened forest. The copy into
    that buffer is not timed (DeFT, Table 16: "KV cache management is not included").
    """

    name = "dense-mask"

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def prepare(self, inputs: Inputs) -> Prepared:
        place = torch.from_numpy(inputs.flattened_slots()).to(inputs.device)
        kv_heads, dim = inputs.case.kv_heads, inputs.head_dim
        group = inputs.case.query_heads // kv_heads
        scores = inputs.batch * inputs.case.query_heads * len(place) * inputs.q.itemsize
        if scores > MOST_SCORE_BYTES:
            raise Refused(f"its scores take {scores / 2**30:.0f} GiB")
        keys, values = (
            cache.view(-1, kv_heads, dim)[place].transpose(0, 1).contiguous()
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        mask = self._mask(inputs.forest, inputs)
        queries = inputs.q.view(inputs.batch, kv_heads, group, dim).permute(1, 0, 2, 3)
        queries = queries.reshape(kv_heads, inputs.batch * group, dim).contiguous()
        wide = mask.repeat_interleave(group, 0)

        def launch() -> torch.Tensor:
            weights = torch.bmm(queries, keys.transpose(1, 2))
            weights = weights / math.sqrt(dim)
            weights = weights + wide
            weights = torch.softmax(weights, -1)
            out = torch.bmm(weights, values).view(kv_heads, inputs.batch, group, dim)
            return out.permute(1, 0, 2, 3).reshape(inputs.batch, -1, dim)

        return Prepared(launch, tolerance=2e-2)

    @staticmethod
    def _mask(forest: PrefixForest, inputs: Inputs) -> torch.Tensor:
        """[B, N] of 0 where a request attends to a token, and -inf elsewhere."""
        seen = np.zeros((inputs.batch, int(forest.length.sum())), dtype=bool)
        begin = np.cumsum(forest.length) - forest.length
        for node in range(forest.num_nodes):
            queries = forest.order[forest.query_begin[node] : forest.query_end[node]]
            seen[queries, begin[node] : begin[node] + forest.length[node]] = True
        allowed = torch.from_numpy(seen).to(inputs.device)
        mask = torch.zeros(allowed.shape, dtype=inputs.q.dtype, device=inputs.device)
        return mask.masked_fill_(~allowed, -math.inf)


class RadixAttention(Method):
    """SGLang's Triton decode kernel: what DeFT and FastTree call Radix Attention.

    Each request reads its whole context by the pages of the radix tree (DeFT, Remark A.4). The
    number of splits of each request is the host's own choice, of at most 8.
    """

    name = "radix-attention"
    _SPLITS = 8

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it needs a GPU"
        try:
            self._functions()
        except ImportError as error:
            return f"SGLang is not installed: {error}"
        return None

    def _functions(self) -> tuple[Callable[..., Any], Any]:
        kernel = import_module("sglang.kernels.ops.attention.decode_attention").decode_attention_fwd
        metadata = import_module("sglang.kernels.ops.attention.metadata")
        return kernel, metadata.get_num_kv_splits_triton

    def prepare(self, inputs: Inputs) -> Prepared:
        kernel, count_splits = self._functions()
        batch, heads, lens = inputs.batch, inputs.case.query_heads, inputs.tables.seq_lens
        position = np.concatenate([np.arange(n) for n in lens])
        slots = torch.from_numpy(inputs.slots(np.repeat(np.arange(batch), lens), position))
        slots = slots.to(inputs.device)
        ends = torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32))
        ends = ends.to(inputs.device)
        splits = torch.empty(batch, dtype=torch.int32, device=inputs.device)
        sms = torch.cuda.get_device_properties(inputs.device).multi_processor_count
        sizes = (batch, 1, heads, inputs.case.kv_heads, self._SPLITS, sms)
        most = max(256, 1 << (batch - 1).bit_length())
        count_splits[(1,)](splits, inputs.seq_lens, *sizes, MAX_NUM_SEQ=most)
        logits = torch.empty(
            batch, heads, self._SPLITS, inputs.head_dim, dtype=torch.float32, device=inputs.device
        )
        lse = torch.empty(batch, heads, self._SPLITS, dtype=torch.float32, device=inputs.device)
        flat = (-1, inputs.case.kv_heads, inputs.head_dim)
        keys, values = inputs.k_cache.view(flat), inputs.v_cache.view(flat)
        out = torch.empty_like(inputs.q)
        where = (ends, slots, logits, lse, splits, self._SPLITS)
        scales = (inputs.head_dim**-0.5, 1.0, 1.0)

        def launch() -> torch.Tensor:
            kernel(inputs.q, keys, values, out, *where, *scales)
            return out

        return Prepared(launch)

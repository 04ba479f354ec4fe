"""Tree attention of the layers that share a block table: vLLM's attention group."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from deft_backend.attention import LayerAddresses, PlannedAttention, TreeAttention, layer_addresses
from deft_backend.hosts.common.eager_steps import (
    Repeats,
    capturing,
    has_one_way,
    shares_too_little,
)
from deft_backend.hosts.common.latches import FailureLatch, OnceLog, differ
from deft_backend.hosts.common.limits import LayerShape, refused
from deft_backend.hosts.vllm.cached_prefixes import CachedPrefixes
from deft_backend.hosts.vllm.content import Content
from deft_backend.hosts.vllm.layers import Layer, kv_views
from deft_backend.hosts.vllm.step import LayerCall, TreeStep
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import MIXED, Decoded
from deft_backend.telemetry.shown_batch import Batch
from deft_backend.telemetry.state import ServerState

HIDDEN_BATCH = (
    "a server that can sleep shows no batch: its page table may be unmapped while it is read"
)
"""The answer of a server that can sleep to `deft explain --server`."""


@dataclass(eq=False)
class GroupAttention(ABC):
    """The attention over plans of one group: launches only, so a graph can hold a step."""

    attention: PlannedAttention  # Sized for the group's layers and block size
    settings: Settings
    state: ServerState  # receives the counters
    tree_layers: int  # layers of the whole model that go through tree attention
    counts: bool  # whether this group counts the server's steps; exactly one group does
    shape: LayerShape  # of its layers
    dtype: torch.dtype  # of queries and results
    kv_dtype: torch.dtype
    columns: int  # of a page table; plans have room for no more
    # What the requests share; without it, the host decodes mixed steps.
    prefixes: CachedPrefixes | None = None
    equal_bits: bool = False  # vLLM's batch-invariant mode: tree attention decodes every request
    shows_batch: bool = True  # whether other threads may read the host's tensors between steps
    current: TreeStep | None = None  # the step of the metadata that was made last
    failure: FailureLatch = field(default_factory=FailureLatch)
    unfit: str | None = None  # why layers that run through tree attention are the host's after all
    _log: OnceLog = field(default_factory=OnceLog)
    _attached: bool = False
    # Requests and query tokens of the captured graphs that hold tree attention.
    _captured: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.failure.keeps_graphs = lambda: bool(self._captured)
        self.query_tokens = self.attention.query_tokens

    def takes(self, layer: Layer) -> bool:
        if layer.reason is not None:
            return False
        return layer.shape == self.shape and (layer.kv_dtype or self.dtype) == self.kv_dtype

    def refuses(self, requests: int, query_tokens: int) -> str | None:
        """Why the host decodes this padded size, or None; batches of a size share a graph."""
        reason = self.failure.reason or self.unfit
        if reason is not None and (requests, query_tokens) not in self._captured:
            return reason
        return refused(requests, self.settings, self.attention.max_batch)

    @abstractmethod
    def leaves(self, content: Content, common: Any, *, capturing: bool) -> str | None:
        """Why the host decodes a batch that tree attention could, or None, by the scheduler's
        messages: all ranks agree.
        """

    def repeat(self, step: TreeStep, owner: Any, *tensors: torch.Tensor) -> bool:
        """Launch a layer as the step's layer before it; False if it needs :meth:`attend`."""
        return False

    def attend(self, step: TreeStep, call: LayerCall) -> bool:
        """Compute a layer into its output; False if the host's implementation must."""
        if not self.takes(call.layer):
            if step.whole is not None:  # its graph would compute some rows in no layer
                self.leave(step, call.layer.reason or "layers of several shapes in one graph")
            return False
        if self.failure.reason is not None:
            return self._left(step)
        if not step.ran or id(call.owner) in step.ran:
            step.ran.clear()
            if capturing(step.seq_lens) and (step.whole is None or self.unfit is None):
                self._captured.add(step.size)
            try:
                self.attention.plan_batch(
                    step.page_table, step.seq_lens, query_tokens=step.query_tokens
                )
            except Exception as error:
                self.failure.planning_failed(error)
                return self._left(step)
        try:
            rows = call.output[: step.tokens]
            self._run(step, call, rows)
            if self.settings.verify:
                self._cross_check(rows, call.host)
        except Exception as error:
            self.failure.kernel_failed(error)
            return self._left(step)
        step.ran.add(id(call.owner))
        return True

    def _left(self, step: TreeStep) -> bool:
        if capturing(step.seq_lens):
            self._captured.discard(step.size)
        if step.counted is not None:
            self.state.count_failure(step.counted, str(self.failure.reason or self.unfit))
            step.counted = None
        return False

    @abstractmethod
    def _run(self, step: TreeStep, call: LayerCall, rows: torch.Tensor) -> None:
        """Compute one layer of the planned step into `rows` [tokens, Hq, D]."""

    def count(self, step: TreeStep | None, decoded: Decoded, reason: str | None) -> None:
        """Count the decode rows of a batch, of which no graph is captured. Graphs replay steps
        without Python, so this counts the steps of tree attention, too. A step that fails is
        counted again, in :meth:`attend`.
        """
        if not self.counts:
            return
        if not self._attached:
            # Earlier plans were for the warm-up and for captures.
            self._attached = True
            self.state.on_device.attach(self.attention.counters.numpy())
            self.state.device_tree_layers = self.tree_layers
        self.state.count(decoded, reason)
        if step is None:
            return
        step.counted = decoded
        batch = Batch(step.page_table, step.seq_lens, self.attention.page_size)
        self.state.batch = batch if self.shows_batch else HIDDEN_BATCH

    def leave(self, step: TreeStep, reason: str) -> None:
        self.unfit = reason
        self._log.layers_left(reason)
        self._left(step)

    def _cross_check(self, out: torch.Tensor, host: Callable[[], object]) -> None:
        if capturing(out):  # the CPU can read nothing back
            return
        ours = out.clone()
        host()
        found = differ(ours, out, eight_bits=self.kv_dtype.itemsize == 1)
        if found is None:
            out.copy_(ours)
        else:
            self.failure.results_differ(*found)


_HELD = "deft_held"


class HeldLayer(NamedTuple):
    """Without a reference to the KV cache: the host frees the one of its first, trial captures."""

    kv_cache: weakref.ref[torch.Tensor]
    layer: Layer  # with the scales of a cache of 8 bits
    sm_scale: float
    sinks: torch.Tensor | None
    addresses: LayerAddresses

    def holds(self, owner: Any, kv_cache: torch.Tensor) -> bool:
        if self.kv_cache() is not kv_cache or self.layer is not owner.deft_layer:
            return False
        if self.sm_scale != owner.scale or self.addresses.k != kv_cache.data_ptr():
            return False
        if self.sinks is None:
            return True
        return self.sinks is owner.sinks and self.addresses.sinks == self.sinks.data_ptr()


@dataclass(eq=False)
class TreeGroup(GroupAttention):
    """Later layers of an eager step repeat the launches of the layer before."""

    attention: TreeAttention

    def __post_init__(self) -> None:
        super().__post_init__()
        self.repeats = Repeats(self.attention, self._log, verify=self.settings.verify)
        on_gpu = self.attention.device.type == "cuda"
        self.costs = self.attention.target.costs if on_gpu else None

    def leaves(self, content: Content, common: Any, *, capturing: bool) -> str | None:
        mixed = content.kind == MIXED
        size = content.requests, self.query_tokens if content.verifies else 1
        if mixed and self.prefixes is None:
            return "steps with prefills are not split"
        if capturing or (not mixed and size in self._captured):
            return None  # a replay costs the CPU nothing
        return self.shares_too_little(prefills=mixed)

    def shares_too_little(self, *, prefills: bool) -> str | None:
        """The function of this name for the requests that decode."""
        if self.prefixes is None or has_one_way(self.settings):
            return None
        saved = self.prefixes.shared_tokens * 2 * self.shape.num_kv_heads * self.shape.head_dim
        saved *= self.kv_dtype.itemsize
        return shares_too_little(saved, self.tree_layers, self.costs, prefills=prefills)

    def repeat(self, step: TreeStep, owner: Any, *tensors: torch.Tensor) -> bool:
        query, kv_cache, output = tensors
        held: HeldLayer | None = getattr(owner, _HELD, None)
        if held is None or not step.ran or id(owner) in step.ran or self.failure.reason is not None:
            return False
        if not held.holds(owner, kv_cache) or step.whole is not None:
            return False
        size = step.tokens.bit_length(), step.query_tokens
        try:
            repeated = self.repeats.repeat(held.addresses, query, output, size)
        except Exception as error:
            self.failure.kernel_failed(error)
            return False
        if repeated:
            step.ran.add(id(owner))
        return repeated

    def _run(self, step: TreeStep, call: LayerCall, rows: torch.Tensor) -> None:
        layer, query, kv_cache = call.layer, call.query[: step.tokens], call.kv_cache
        k_scale: float | torch.Tensor = 1.0
        v_scale: float | torch.Tensor = 1.0
        if layer.scales is not None:
            q_scale, k_scale, v_scale = layer.scales
            if query.dtype != self.attention.dtype:  # some backends take queries of 8 bits
                query, k_scale = query.to(self.attention.dtype), k_scale * q_scale
            kv_cache = kv_cache.view(self.attention.kv_dtype)
        k_cache, v_cache = kv_views(kv_cache, layer.shape.head_dim)
        of_layer: dict[str, Any] = {
            "sm_scale": layer.sm_scale,
            "logit_cap": layer.logit_cap,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "sinks": call.sinks,
        }
        # Padding requests have length 0 or no rows. Their rows get zeros, or stay as they are.
        read, starts = (k_cache, v_cache, step.page_table, step.seq_lens), step.query_start
        full = partial(self.attention.run, query, *read, query_start=starts, out=rows, **of_layer)
        # `repeat` gets queries as they are; graphs hold full runs.
        if query.dtype != call.query.dtype or step.whole is not None:
            full()
            return
        addresses = layer_addresses(k_cache, v_cache, **of_layer)
        size = step.tokens.bit_length(), step.query_tokens
        self.repeats.run(full, addresses, call.query, rows, size)
        mine, cache = cast(Any, call.owner).deft_layer, weakref.ref(call.kv_cache)
        setattr(call.owner, _HELD, HeldLayer(cache, mine, layer.sm_scale, call.sinks, addresses))

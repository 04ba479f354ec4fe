"""Tree attention of the layers that share a block table: vLLM's attention group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from deft_backend.attention import TreeAttention
from deft_backend.compile.clock import COMPILING
from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.common.division import LayerShape
from deft_backend.hosts.common.latches import FailureLatch, OnceLog, differ
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.vllm.start.layers import Layer, kv_views
from deft_backend.hosts.vllm.step.step import LayerCall, TreeStep, context_tokens
from deft_backend.settings.config import Settings
from deft_backend.telemetry.shown_batch import Batch
from deft_backend.telemetry.state import ServerState

HIDDEN_BATCH = (
    "a server that can sleep shows no batch: its page table may be unmapped while it is read"
)
"""The answer of a server that can sleep to `deft explain --server`."""


@dataclass(eq=False)
class GroupAttention:
    """The :class:`TreeAttention` of one attention group, and the rules for its use.

    With the device planner a step consists of launches only, so a captured graph can hold it.
    """

    attention: TreeAttention  # Sized for the group's layers and block size
    settings: Settings
    state: ServerState  # receives the counters
    tree_layers: int  # layers of the whole model that go through tree attention
    counts: bool  # whether this group counts the server's steps; exactly one group does
    plans_on_device: bool  # by the device planner; else the host planner plans from CPU memory
    shows_batch: bool = True  # whether other threads may read the host's tensors between steps
    extends: bool = False  # whether its steps are short extends, which are no decode steps
    short_extends: Any = None  # Extends, if tree attention computes some for the same layers
    current: TreeStep | None = None  # the step of the metadata that was made last
    failure: FailureLatch = field(default_factory=FailureLatch)
    _log: OnceLog = field(default_factory=OnceLog)
    _attached: bool = False

    def __post_init__(self) -> None:
        held = self.attention
        self.shape = LayerShape(held.num_query_heads, held.num_kv_heads, held.head_dim)
        self.dtype, self.kv_dtype, self.page_size = held.dtype, held.kv_dtype, held.page_size
        self.query_tokens = held.query_tokens

    def takes(self, layer: Layer) -> bool:
        """Whether a layer goes through tree attention."""
        if self.failure.reason is not None or layer.reason is not None:
            return False
        return layer.shape == self.shape and (layer.kv_dtype or self.dtype) == self.kv_dtype

    def refuses(self, requests: int) -> str | None:
        """Why the host's implementation decodes a batch of `requests` requests, or None.

        This must follow from the padded size alone: the host replays one graph for every batch
        padded to a size.
        """
        return self.failure.reason or refused(requests, self.settings, self.attention.max_batch)

    def uneven(self, common: Any) -> str | None:
        """Why the numbers of query tokens rule out tree attention; None if they do not."""
        return None

    def too_little(self, *, capturing: bool) -> str | None:
        """Why a batch shares too little for tree attention; None if that does not matter."""
        return None

    def holds(self, step: TreeStep) -> bool:
        """Whether this group's plans hold another group's step."""
        return step.query_tokens <= self.query_tokens and self.refuses(len(step.seq_lens)) is None

    def attend(self, step: TreeStep, call: LayerCall) -> bool:
        """Compute a layer into its output; False if the host's implementation must."""
        if step.unplanned or not self.takes(call.layer):
            return False
        first = not step.ran or id(call.owner) in step.ran
        before = self.state.on_device.read() if first else None
        loaded = 0
        if first:
            step.ran.clear()
            try:
                loaded = self._plan(step)
            except Exception as error:
                step.unplanned = True
                if self.plans_on_device:
                    self.failure.planning_failed(error)
                else:
                    self._log.batch_left(error)
                self._count_failure(step, "planning failed")
                return False
        try:
            rows = call.output[: step.tokens]
            self._run(step, call, rows)
            if self.settings.verify:
                self._cross_check(rows, call.host)
        except Exception as error:
            self.failure.kernel_failed(error)
            if before is not None:
                self.state.on_device.forget(before)
                self._count_failure(step, "kernel failed")
            return False
        step.ran.add(id(call.owner))
        if first and self.counts and self.extends:
            self.state.short_extends += 1
        elif first and self.counts and not self.plans_on_device:
            self.state.count_tree(int(step.seq_lens.sum()), loaded, self.tree_layers)
        return True

    def _plan(self, step: TreeStep) -> int:
        """Plan a step from the host's own tensors; the tokens that a plan on the host loads."""
        if self.plans_on_device:
            self.attention.plan_on_device(
                step.page_table, step.seq_lens, query_tokens=step.query_tokens
            )
            return 0
        began, compiled = time.perf_counter(), COMPILING.seconds
        lens = step.seq_lens.numpy()
        # No check: vLLM keeps both copies of a page computed twice, and later requests may hold
        # either. Equal page ids still mean equal tokens before them.
        forest = forest_from_page_tables(
            step.page_table.numpy(), lens, self.attention.page_size, check=False
        )
        plan = self.attention.plan(forest, query_tokens=step.query_tokens)
        state = self.state
        state.plans += 1
        state.plan_seconds += time.perf_counter() - began - (COMPILING.seconds - compiled)
        if self.counts:
            state.forest, state.rids = forest, [str(row) for row in range(len(lens))]
        return plan.loaded_tokens(lens)

    def _run(self, step: TreeStep, call: LayerCall, rows: torch.Tensor) -> None:
        """Compute one layer of the planned step into `rows` [tokens, Hq, D]."""
        layer, query, kv_cache = call.layer, call.query[: step.tokens], call.kv_cache
        k_scale: float | torch.Tensor = 1.0
        v_scale: float | torch.Tensor = 1.0
        if layer.scales is not None:
            q_scale, k_scale, v_scale = layer.scales
            if query.dtype != self.attention.dtype:  # some backends take queries of 8 bits
                query, k_scale = query.to(self.attention.dtype), k_scale * q_scale
            kv_cache = kv_cache.view(self.attention.kv_dtype)
        # Padding requests have length 0 or no rows. For length 0 the kernels write zeros.
        self.attention.run(
            query, *kv_views(kv_cache, layer.shape.head_dim), step.page_table, step.seq_lens,
            query_start=step.query_start, sm_scale=layer.sm_scale, logit_cap=layer.logit_cap,
            k_scale=k_scale, v_scale=v_scale, sinks=call.sinks, out=rows,
            static_launch=self.plans_on_device,
        )  # fmt: skip

    def count(self, step: TreeStep | None, reason: str | None, common: Any) -> None:
        """Count a batch that the host's implementation decodes, or the tokens of a verification.

        The planner's kernels, or :meth:`attend`, count the steps of tree attention. Graphs replay
        steps without Python, so the builder counts a verification's tokens.

        - `reason`: why the host's implementation decodes the batch; None for prefills, too.
        """
        if not self.counts or (step is None and reason is None):
            return
        if self.plans_on_device and not self._attached:
            # Earlier plans were for the warm-up and for captures.
            self._attached = True
            counters = self.attention.device_planner.counters
            self.state.on_device.attach(counters.numpy())
            self.state.device_tree_layers = self.tree_layers
        if reason is not None:
            self.state.count_host(reason, context_tokens(common))
        if step is None or step.group.extends:
            return
        if step.query_tokens > 1:
            step.counted = int(common.query_start_loc_cpu[common.num_reqs])
            self.state.verified_tokens += step.counted
        if self.plans_on_device:
            batch = Batch(step.page_table, step.seq_lens, self.page_size)
            self.state.batch = batch if self.shows_batch else HIDDEN_BATCH

    def leave(self, reason: str) -> None:
        """Note that a layer of planned steps runs in the host's kernel; log each reason once."""
        self._log.layers_left(reason)

    def _count_failure(self, step: TreeStep, reason: str) -> None:
        """Count a step that the host's implementation decodes after a failure."""
        if self.counts and not self.extends and not _capturing(step.seq_lens):
            self.state.verified_tokens -= step.counted
            on_cpu = step.seq_lens.device.type == "cpu"
            self.state.count_host(reason, int(step.seq_lens.sum()) if on_cpu else 0)

    def _cross_check(self, out: torch.Tensor, host: Callable[[], object]) -> None:
        """Compare `out` with the host's result; keep the host's result if they differ."""
        if _capturing(out):  # the CPU can read nothing back
            return
        ours = out.clone()
        host()
        found = differ(ours, out, eight_bits=self.kv_dtype.itemsize == 1)
        if found is None:
            out.copy_(ours)
        else:
            self.failure.results_differ(*found)


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

"""Which batches go through tree attention: they are planned from the page table in every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.sglang.latent import LatentSharing
from deft_backend.hosts.sglang.mixed import EagerSharing, MixedSteps
from deft_backend.hosts.sglang.step_inputs import DECODE, StepKind, Verification
from deft_backend.hosts.sglang.tree_layers import StepLayers, TreeStep
from deft_backend.settings.config import Settings
from deft_backend.telemetry import counters
from deft_backend.telemetry.counters import Decoded
from deft_backend.telemetry.shown_batch import Batch


@dataclass(eq=False)
class TreeSteps:
    """Every batch of DEFT_MIN_BATCH requests or more decodes or verifies with tree attention.
    Planning consists of launches only, which a graph records, so it costs no CPU time.
    """

    layers: StepLayers
    settings: Settings
    verification: Verification | None = None  # for servers that speculate
    # Whether to keep the last batch, so that ``deft explain`` can show what it shares.
    shows: bool = True
    # Whether decode batches are planned. An attention for MLA has one number of query tokens.
    decodes: bool = True
    # Leaves MLA batches that share too little to the host, which captures two sets of graphs.
    sharing: LatentSharing | None = None
    # Leaves eager steps that share too little to the host; None: tree attention decodes them all.
    eager: EagerSharing | None = None
    mixed: MixedSteps | None = None  # for servers that mix prefill and decode in a step
    # Batch sizes whose last captured graph holds tree attention.
    _tree_graphs: set[int] = field(default_factory=set)
    # Whether any graph may hold it, also an earlier or a failed one of a size. Such a graph reads
    # page tables while it runs.
    _reads_tables: bool = False
    _counting: bool = False
    _recaptures: bool = False  # the host captures again and has decoded no step since
    _captures_tree: bool = False  # the host captures the second set of graphs
    _left: str | None = None  # why `sharing` left the last batch to the host

    def __post_init__(self) -> None:
        self.layers.failure.keeps_graphs = lambda: bool(self._tree_graphs)

    def begin(self, forward_batch: Any) -> None:
        layers = self.layers
        layers.step = None
        kind = self._kind_of(forward_batch.forward_mode)
        if kind is not None:
            self._count_steps()
            reason = self._refused(forward_batch.batch_size) or kind.unsuitable(forward_batch)
            reason = reason or self._too_little(forward_batch)
            if reason is None and self.eager is not None:
                reason = self.eager.too_little(forward_batch, prefills=False)
            if reason is None:
                kind.load(forward_batch.spec_info)
                ran = partial(self._count, kind, forward_batch)
                step = TreeStep(forward_batch, None, ran=ran, failed=partial(ran, "kernel failed"))
                if self._planned(step, kind):
                    self._show(forward_batch)
                    layers.begin(step)
                    return
            self._count(kind, forward_batch, reason or "planning failed")
        elif self.mixed is not None:
            self._count_steps()
            split = self.mixed.begin(forward_batch)
            if split is not None:
                layers.begin(split)
                return
        layers.host.init_forward_metadata(forward_batch)

    def begin_capture(self, forward_batch: Any) -> None:
        """A capture of this size begins; some backends make new buffers if told twice."""
        layers = self.layers
        layers.step = None
        kind = self._kind_of(forward_batch.forward_mode)
        in_capture = not self._captures_tree
        layers.host.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if kind is None:
            return
        self._hold_counters(True)
        size = forward_batch.batch_size
        # The host captures a size again for LoRA adapters, and when its weights have changed.
        self._tree_graphs.discard(size)
        if self.sharing is not None and not self._captures_tree:
            return
        reason = self._refused(size) or kind.unsuitable(forward_batch, captured=True)
        if reason is None:
            captured = TreeStep(forward_batch, None, captured=True, prepared=forward_batch)
            captured.failed = partial(self._tree_graphs.discard, size)
            layers.step = captured
            self._tree_graphs.add(size)
            self._reads_tables = True

    def begin_replay(self, forward_batch: Any) -> None:
        """A graph is replayed. Only captures have shown which graphs hold tree attention."""
        layers = self.layers
        layers.step = None
        kind = self._kind_of(forward_batch.forward_mode)
        if kind is not None:
            self._count_steps()
            size = forward_batch.batch_size
            if size not in self._tree_graphs:
                self._count(kind, forward_batch, self._refused(size) or "no graph")
            elif self._left is not None:
                self._count(kind, forward_batch, self._left)
            else:
                kind.load(forward_batch.spec_info)
                self._show(forward_batch)
                self._count(kind, forward_batch)
                if not layers.host_in_graphs and self.sharing is None:
                    return
        elif self.mixed is not None:
            self.mixed.count_graph(forward_batch)
        layers.host.init_forward_metadata_out_graph(forward_batch, in_capture=False)

    def launch_planning(self, forward_batch: Any) -> None:
        if self.layers.has_planned(forward_batch):
            kind = self._kind_of(forward_batch.forward_mode)
            assert self.layers.step is not None
            assert kind is not None
            self._planned(self.layers.step, kind)

    def load_drafts(self, spec_info: Any, graph_size: int | None) -> None:
        """Load the links once more: the host may prepare a replay before it has drafted."""
        if self.verification is not None and graph_size in self._tree_graphs:
            self.verification.load(spec_info)

    def takes(self, forward_batch: Any) -> bool:
        """Whether a batch replays the second set, on all ranks alike: graphs hold collectives."""
        kind = self._kind_of(forward_batch.forward_mode)
        return kind is not None and self._too_little(forward_batch) is None

    def capture_tree(self, capturing: bool) -> None:
        self._captures_tree = capturing
        self.layers.step = None

    def _too_little(self, forward_batch: Any) -> str | None:
        self._left = None if self.sharing is None else self.sharing.too_little(forward_batch)
        return self._left

    def reads_during_forward(self, mode: Any) -> bool:
        """The host asks before it names the graph that it replays, so any such graph counts."""
        return self.layers.splits or (self._reads_tables and self._kind_of(mode) is not None)

    def _kind_of(self, mode: Any) -> StepKind | None:
        if mode.is_decode():
            return DECODE if self.decodes else None
        return self.verification if mode.is_target_verify() else None

    def _refused(self, requests: int) -> str | None:
        most = self.layers.attention.max_batch
        return self.layers.failure.reason or refused(requests, self.settings, most)

    def _planned(self, step: TreeStep, kind: StepKind) -> bool:
        layers = self.layers
        try:
            step.inputs = inputs = kind.inputs(step.batch)
            inputs.plan(layers.attention, layers.page_table)
        except Exception as error:
            if step.captured:
                self._tree_graphs.discard(step.batch.batch_size)
            layers.failure.planning_failed(error)
            layers.step = None
            return False
        return True

    def _show(self, forward_batch: Any) -> None:
        if self.shows:
            self.layers.state.batch = Batch(
                self.layers.page_table, forward_batch.seq_lens, 1, forward_batch.req_pool_indices
            )

    def _count(self, kind: StepKind, forward_batch: Any, reason: str | None = None) -> None:
        tokens, lens = forward_batch.seq_lens_sum, forward_batch.seq_lens_cpu
        if tokens is None:
            tokens = 0 if lens is None else lens.sum()
        requests = forward_batch.batch_size - getattr(forward_batch, "num_padding", 0)
        decoded = Decoded(counters.DECODE, requests, int(tokens))
        if kind is self.verification:
            verified = requests * kind.query_tokens
            decoded = decoded._replace(kind=counters.VERIFICATION, verified=verified)
        self.layers.state.count(decoded, reason)

    def _count_steps(self) -> None:
        """Count from the first step on, without the plans of warm-up and capture."""
        if not self._counting:
            self._counting = True
            self.layers.state.on_device.attach(self.layers.attention.counters.numpy())
        self._hold_counters(False)

    def _hold_counters(self, held: bool) -> None:
        """A server that has decoded counts no step while it captures again."""
        if self._counting and self._recaptures is not held:
            self._recaptures = held
            device = self.layers.attention.device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            on_device = self.layers.state.on_device
            (on_device.hold if held else on_device.go_on)()

"""Decode batches that the host planner plans when their composition changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from deft_backend.hosts.sglang.step.decode_plan import BatchDecision, BatchObserver, DecodePlanner
from deft_backend.hosts.sglang.step.extends import ExtendSteps
from deft_backend.hosts.sglang.step.kinds import DECODE
from deft_backend.hosts.sglang.step.tree_layers import TreeLayers, TreeStep


@dataclass
class StepDecision:
    """Which kernel decodes a step."""

    rids: Any  # the batch's own list of request ids; the host makes a new list in each step
    # The batch's tensor of page ids for the new tokens; a graph's view of the batch shares it.
    slots: Any
    tokens: int  # tokens of all requests
    planned: BatchDecision | None  # the plan, if tree attention decodes the step


@dataclass(eq=False)
class HostPlannedSteps:
    """Sends a decode batch through tree attention if the scheduler made it and it shares enough.

    Batches of a warm-up or a capture do not come from the scheduler. If the decision fails, a log
    line gives the error and the host's kernel decodes the step.
    """

    layers: TreeLayers
    planner: DecodePlanner
    observer: BatchObserver  # gives the scheduler's requests behind a forward batch
    extends: ExtendSteps | None = None
    needs_cpu_seq_lens: bool = True  # the CPU builds the forest from them
    _capturing: bool = False  # the host captures the second set of graphs
    _decided: StepDecision | None = None

    def begin(self, forward_batch: Any) -> None:
        layers = self.layers
        layers.step = None
        taken = forward_batch.forward_mode.is_decode() and self.takes(forward_batch)
        decided, self._decided = self._decided, None  # the step begins
        reason = layers.failure.reason
        # The host may pad a batch after the decision.
        if taken and forward_batch.batch_size != len(forward_batch.rids):
            reason = "padded batch"
        if not taken or reason is not None:
            if taken and reason is not None and decided is not None:
                layers.state.count_host(reason, decided.tokens)
            layers.host.init_forward_metadata(forward_batch)
            return
        assert decided is not None
        layers.begin(
            TreeStep(
                forward_batch, DECODE.inputs(forward_batch), static_launch=False,
                ran=partial(self._count_tree, decided),
                failed=partial(layers.state.count_host, "kernel failed", decided.tokens),
            )
        )  # fmt: skip

    def begin_capture(self, forward_batch: Any) -> None:
        """The host captures each size twice: for itself, then with tree attention.

        If told of a second capture, some backends (FlashInfer) make new buffers for the size. From
        then on they fill the new buffers, but their graph reads the old ones.
        """
        layers = self.layers
        layers.step = None
        layers.host.init_forward_metadata_out_graph(forward_batch, in_capture=not self._capturing)
        if self._capturing:
            layers.step = TreeStep(
                forward_batch, DECODE.inputs(forward_batch), captured=True, host_ready=True
            )

    def begin_replay(self, forward_batch: Any) -> None:
        self.layers.step = None
        decided = self._decided
        if (
            decided is not None
            and decided.planned is not None
            and forward_batch.forward_mode.is_decode()
            # The host passes a view of the decided batch.
            and forward_batch.out_cache_loc is decided.slots
        ):
            self._count_tree(decided)
            if not self.layers.host_in_graphs:  # no layer reads the host's metadata
                return
        self.layers.host.init_forward_metadata_out_graph(forward_batch, in_capture=False)

    def launch_planning(self, forward_batch: Any) -> None:
        """The plan is on the device before a graph runs; MLA lays it out in every step."""
        if self.layers.has_planned(forward_batch):
            self.layers.lay_out()

    def load_drafts(self, spec_info: Any, graph_size: int | None) -> None:
        """Servers that speculate plan on the device."""

    def takes(self, forward_batch: Any) -> bool:
        """Whether tree attention decodes a batch; decided once for each batch.

        The host asks before it chooses its graph. An eager step asks again.
        """
        rids = forward_batch.rids
        if rids is None or self._decided is None or self._decided.rids is not rids:
            self._decided = self._decide(forward_batch)
        return self._decided.planned is not None

    def capture_tree(self, capturing: bool) -> None:
        """The host captures the next forwards with tree attention, or without it again.

        During the capture the plan on the device is empty, because none covers the capture's batch.
        The host may capture between two steps or within one, so the plan in use is restored.
        """
        self._capturing = capturing
        self.layers.step = None
        if capturing:
            self.layers.attention.clear_plan()
        else:
            self.layers.attention.restore_plan()

    def reads_during_forward(self, mode: Any) -> bool:
        """The host asks after it has chosen the graph. Without a decision the answer is yes."""
        decided = self._decided
        return bool(mode.is_decode()) and (decided is None or decided.planned is not None)

    def replayed_tree(self, forward_batch: Any) -> bool:
        """Whether the graph replayed for a batch reads page tables while it runs."""
        return bool(forward_batch.forward_mode.is_decode()) and self.takes(forward_batch)

    def _count_tree(self, decided: StepDecision) -> None:
        assert decided.planned is not None
        loaded = decided.planned.loads(decided.tokens)
        self.layers.state.count_tree(decided.tokens, loaded, self.layers.tree_layers)

    def _decide(self, forward_batch: Any) -> StepDecision:
        """Plan the batch if it goes through tree attention; if not, count it with the reason."""
        rids, slots = forward_batch.rids, forward_batch.out_cache_loc
        lens = forward_batch.seq_lens_cpu
        if lens is None:
            self.layers.log.warn(
                "the batch has no sequence lengths in CPU memory, which the host planner needs. "
                "The host's kernel decodes such batches."
            )
            return StepDecision(rids, slots, 0, None)
        seq_lens = lens.numpy()
        tokens = forward_batch.seq_lens_sum
        tokens = int(seq_lens.sum()) if tokens is None else int(tokens)
        try:
            planned = self._plan(forward_batch, seq_lens, tokens)
        except Exception as error:
            self.layers.log.batch_left(error)
            planned = "planning failed"
        if not isinstance(planned, str):
            return StepDecision(rids, slots, tokens, planned)
        self.layers.state.count_host(planned, tokens)
        return StepDecision(rids, slots, tokens, None)

    def _plan(self, forward_batch: Any, seq_lens: Any, tokens: int) -> BatchDecision | str:
        """The plan for this step, or why the host's kernel decodes it.

        Not for a failure: it may be this rank's alone, and all ranks must replay one graph.
        """
        observed = self.observer.of(forward_batch)
        if observed is None:
            return "batch without requests"
        size = forward_batch.batch_size
        if len(observed.requests) != size or len(seq_lens) != size:
            return "beam search" if observed.has_beams else "padded batch"
        planned = self.planner.step(observed, seq_lens, tokens)
        return planned if planned.host_reason is None else planned.host_reason

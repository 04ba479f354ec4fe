"""Mixed steps: some requests decode and others prefill (``--enable-mixed-chunk``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deft_backend.costs.cost_model import CostModel
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.sglang.prefixes import BatchObserver, CachedTree, Observed
from deft_backend.hosts.sglang.step_inputs import StepInputs
from deft_backend.hosts.sglang.tree_layers import StepLayers, TreeStep
from deft_backend.hosts.sglang.versions import first_rows
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import MIXED, Decoded

STEP_MS, LAYER_MS = 0.7, 0.35
"""About what splitting a step costs the CPU, and each of its layers: launches for the plan, for
stage 1 and 2 and for the parts of the output (docs/kernel-log.md)."""

UNSUITABLE = ("encoder_lens", "attn_cp_metadata", "tbo_children", "global_num_tokens_cpu")
"""Fields of a forward batch that are None where its attention is plain and all of one rank."""


@dataclass(eq=False)
class MixedSteps:
    """Splits the mixed steps whose decode rows, the last ones, share so much KV that it pays. The
    radix tree tells what they share, so nobody waits for the device. `unsplit` is why the host
    computes every mixed step whole.
    """

    layers: StepLayers
    settings: Settings
    observer: BatchObserver
    slice_batch: Callable[[Any, int, int], Any] = first_rows
    unsplit: str | None = None
    costs: CostModel | None = None  # of the GPU; None on the CPU, where whatever is shared pays
    _tree: CachedTree = field(
        default_factory=lambda: CachedTree("the host's kernel decodes in steps that also prefill")
    )
    _too_little: str | None = None

    def begin(self, forward_batch: Any) -> TreeStep | None:
        observed = self.observer.of(forward_batch)
        if observed is None or not observed.decoding:
            return None
        decoded = _decoded(observed, forward_batch)
        reason = self._refused(forward_batch, decoded.rows)
        reason = reason or self._shares_too_little(observed, forward_batch.seq_lens_cpu)
        step = None
        if reason is None:
            step, reason = self._split(forward_batch, decoded)
        if step is None:
            self.layers.state.count(decoded, reason)
        return step

    def count_graph(self, forward_batch: Any) -> None:
        """Count a batch that a CUDA graph of whole prefills computes, with the host's kernel."""
        observed = self.observer.of(forward_batch)
        if observed is not None and observed.decoding:
            self.layers.state.count(_decoded(observed, forward_batch), "in a graph of prefills")

    def _refused(self, forward_batch: Any, rows: int) -> str | None:
        reason = self.layers.failure.reason or self.unsplit
        reason = reason or refused(rows, self.settings, self.layers.attention.max_batch)
        if reason is not None:
            return reason
        size, lens = forward_batch.batch_size, forward_batch.extend_seq_lens_cpu
        plain = (
            forward_batch.seq_lens_cpu is not None
            and lens is not None
            and len(lens) == len(forward_batch.seq_lens) == size > rows
            and all(length == 1 for length in lens[-rows:])
            and all(getattr(forward_batch, name, None) is None for name in UNSUITABLE)
            and not any(getattr(forward_batch, "mm_inputs", None) or ())
        )
        return None if plain else "mixed batch of another form"

    def _shares_too_little(self, observed: Observed, seq_lens: Any) -> str | None:
        """Why the decode rows share too little; decided once for the same requests."""
        requests = observed.requests[-observed.decoding :]
        if self._tree.changed(requests):
            lens = seq_lens.numpy()[-observed.decoding :]
            forest = self._tree.forest(observed.tree_cache, requests, lens)
            if forest is None:
                self._too_little = "unreadable prefix cache"
            else:
                saved = forest.tokens_attended - forest.tokens_stored
                self._too_little = None if self._pays(saved) else "shares too little to be split"
        return self._too_little

    def _pays(self, saved: int) -> bool:
        """Whether tokens that need not be read again take longer than the launches."""
        if self.costs is None:
            return saved > 0
        layers = self.layers.tree_layers
        saved_bytes = saved * self.layers.state.token_bytes * layers
        return self.costs.transfer_ms(saved_bytes) > STEP_MS + LAYER_MS * layers

    def _split(self, forward_batch: Any, decoded: Decoded) -> tuple[TreeStep | None, str | None]:
        layers, rows = self.layers, decoded.rows
        first = sum(forward_batch.extend_seq_lens_cpu[:-rows])
        try:
            rest = self.slice_batch(forward_batch, first, forward_batch.batch_size - rows)
            layers.host.init_forward_metadata(rest)
        except Exception as error:
            self.unsplit = "the host cannot slice such batches"
            layers.log.warn(
                f"the host cannot slice a batch that decodes and prefills ({error!r}). Its kernel "
                "decodes in such steps."
            )
            return None, self.unsplit
        # Copies begin at multiples of 16 bytes, as the tensors that kernels were compiled for do.
        lens, table_rows = forward_batch.seq_lens, forward_batch.req_pool_indices
        inputs = StepInputs(lens[-rows:].clone(), table_rows[-rows:].clone())
        try:
            inputs.plan(layers.attention, layers.page_table)
        except Exception as error:
            layers.failure.planning_failed(error)
            return None, "planning failed"
        ran, failed = (partial(layers.state.count, decoded, why) for why in (None, "kernel failed"))
        parts = {"prepared": rest, "rest": rest, "first": first}
        return TreeStep(forward_batch, inputs, **parts, ran=ran, failed=failed), None


def _decoded(observed: Observed, forward_batch: Any) -> Decoded:
    rows, lens = observed.decoding, forward_batch.seq_lens_cpu
    requests = len(observed.requests)
    tokens = 0 if lens is None else int(lens[requests - rows : requests].sum())
    return Decoded(MIXED, rows, tokens)

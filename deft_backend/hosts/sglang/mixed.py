"""Mixed steps: some requests decode and others prefill (``--enable-mixed-chunk``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deft_backend.costs.cost_model import CostModel
from deft_backend.hosts.common.eager_steps import has_one_way, shares_too_little
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.sglang.prefixes import BatchObserver, CachedTree, Observed
from deft_backend.hosts.sglang.step_inputs import StepInputs
from deft_backend.hosts.sglang.tree_layers import StepLayers, TreeStep
from deft_backend.hosts.sglang.versions import first_rows
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import MIXED, Decoded

UNSUITABLE = ("encoder_lens", "attn_cp_metadata", "tbo_children", "global_num_tokens_cpu")
"""Fields of a forward batch that are None where its attention is plain and all of one rank."""

ASKED_AGAIN = 32
"""Steps after which the tree is read again: that takes milliseconds with hundreds of requests."""


@dataclass(eq=False)
class EagerSharing:
    """What the requests that decode in a step without a graph share. The radix tree tells the CPU,
    so nobody waits for the device. All ranks make the same batches and decide alike.
    """

    layers: StepLayers
    observer: BatchObserver
    costs: CostModel | None = None  # of the GPU; None on the CPU
    _tree: CachedTree = field(
        default_factory=lambda: CachedTree("the host's kernel decodes in steps that also prefill")
    )
    _saved: int | None = None  # tokens of context that are read less often; None: unreadable tree
    _read_for: int = 0  # requests when the tree was read last
    _asked: int = 0  # times since

    def too_little(self, forward_batch: Any, *, prefills: bool) -> str | None:
        """Why the host's kernel decodes the requests, the last ones of a mixed batch; or None."""
        observed, lens = self.observer.of(forward_batch), forward_batch.seq_lens_cpu
        if not prefills and (self.costs is None or observed is None or lens is None):
            return None
        assert observed is not None
        requests = observed.requests[-observed.decoding :]  # all, if none prefills
        held = lens.numpy()[: len(observed.requests)][-len(requests) :]
        # They share no more than all but the longest of them.
        reason = self._reason(int(held.sum() - held.max(initial=0)), prefills)
        if reason is not None:
            return reason
        if self._is_due(len(requests)):
            try:
                if self._tree.changed(requests):
                    of = self._tree.forest(observed.tree_cache, requests, held)
                    self._saved = None if of is None else of.tokens_attended - of.tokens_stored
            except Exception as error:
                self._saved = None
                self.layers.log.warn(f"the requests of a batch cannot be read ({error!r})")
        if self._saved is None:
            return "unreadable prefix cache" if prefills else None
        return self._reason(self._saved, prefills)

    def _reason(self, saved: int, prefills: bool) -> str | None:
        """Why a step is the host's that would read so many tokens less often, or None."""
        layers = self.layers
        saved *= layers.state.token_bytes
        return shares_too_little(saved, layers.tree_layers, self.costs, prefills=prefills)

    def _is_due(self, requests: int) -> bool:
        self._asked += 1
        if self._asked < ASKED_AGAIN and 8 * abs(requests - self._read_for) <= self._read_for:
            return False
        self._asked, self._read_for = 0, requests
        return True


@dataclass(eq=False)
class MixedSteps:
    """Splits the mixed steps whose decode rows, the last ones, share so much KV that it pays.
    `unsplit` is why the host computes every mixed step whole.
    """

    layers: StepLayers
    settings: Settings
    sharing: EagerSharing
    unsplit: str | None = None

    def begin(self, forward_batch: Any) -> TreeStep | None:
        observed = self.sharing.observer.of(forward_batch)
        if observed is None or not observed.decoding:
            return None
        decoded = _decoded(observed, forward_batch)
        reason = self._refused(forward_batch, decoded.rows)
        if reason is None and not has_one_way(self.settings):
            reason = self.sharing.too_little(forward_batch, prefills=True)
        step = None
        if reason is None:
            step, reason = self._split(forward_batch, decoded)
        if step is None:
            self.layers.state.count(decoded, reason)
        return step

    def count_graph(self, forward_batch: Any) -> None:
        """Count a batch that a CUDA graph of whole prefills computes, with the host's kernel."""
        observed = self.sharing.observer.of(forward_batch)
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

    def _split(self, forward_batch: Any, decoded: Decoded) -> tuple[TreeStep | None, str | None]:
        layers, rows = self.layers, decoded.rows
        first = sum(forward_batch.extend_seq_lens_cpu[:-rows])
        try:
            rest = first_rows(forward_batch, first, forward_batch.batch_size - rows)
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

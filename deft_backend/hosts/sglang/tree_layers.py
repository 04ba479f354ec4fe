"""Run each layer of a planned step: through tree attention, or through the host's kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from deft_backend.attention import PlannedAttention, TreeAttention, layer_addresses
from deft_backend.hosts.common.eager_steps import Repeats
from deft_backend.hosts.common.latches import FailureLatch, OnceLog, differ
from deft_backend.hosts.common.limits import Division, LayerShape
from deft_backend.hosts.sglang.layers import unsupported_layer
from deft_backend.hosts.sglang.step_inputs import StepInputs
from deft_backend.telemetry.state import ServerState


@dataclass
class TreeStep:
    batch: Any  # the host's batch; its identity tells whether a layer belongs to the step
    inputs: StepInputs | None  # None until a step that is planned in a graph is planned
    captured: bool = False  # whether the step is captured into a graph
    prepared: Any = None  # the batch that the host's metadata belongs to
    # In a mixed step, the rows before ours as a batch of the host, and their query tokens.
    rest: Any = None
    first: int = 0
    # Called once, after the first layer has run through tree attention.
    ran: Callable[[], None] | None = None
    failed: Callable[[], None] | None = None  # called if a kernel fails before `ran` is called


@dataclass
class LayerCall:
    """A layer's call of the attention backend: ``q`` [T, Hq * D], ``k`` and ``v`` [T, Hkv * D]."""

    q: Any
    k: Any
    v: Any
    layer: Any
    batch: Any
    save_kv_cache: bool
    others: Mapping[str, Any]  # further arguments by name

    def by(self, method: Callable[..., Any]) -> Any:
        return method(
            self.q, self.k, self.v, self.layer, self.batch, self.save_kv_cache, **self.others
        )


class StepLayers(ABC):
    """Holds the host's backend, an attention over plans, and the step that runs now. The host's
    metadata is made only if some layer, or the model itself (`model_asks`), needs it. If a kernel
    fails, the host's kernel decodes from then on.
    """

    known_arguments: tuple[str, ...]
    attention: PlannedAttention

    def __init__(
        self,
        host: Any,
        attention: PlannedAttention,
        state: ServerState,
        division: Division[int, LayerShape],
        *,
        model_asks: bool = False,
        verify: bool = False,
    ) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        self._location = KVWriteLoc
        self.host = host
        self.attention = attention
        self.state = state
        self.division = division
        self.pool = host.token_to_kv_pool
        self.page_table = host.req_to_token_pool.req_to_token
        self.failure = FailureLatch()
        self.log = OnceLog()
        self.step: TreeStep | None = None
        self.host_in_graphs = model_asks
        """Whether any layer in graphs with tree attention reads the host's metadata."""
        self.model_asks, self._verify = model_asks, verify
        self._reasons: dict[int, str | None] = dict(division.host)
        self._left = 0  # layers that turned out to need the host's kernel

    @property
    def tree_layers(self) -> int:
        return self.state.num_layers - self._left

    def begin(self, step: TreeStep) -> None:
        self.step = step
        if self.model_asks:
            self._make_host_ready(step, step.batch)

    def has_planned(self, forward_batch: Any) -> bool:
        """Whether the plan covers this batch, which graphs copy with the same list of lengths."""
        step = self.step
        if step is None or forward_batch is step.batch:
            return step is not None
        lens = getattr(forward_batch, "extend_seq_lens_cpu", None)
        return self.splits and lens is not None and lens is step.batch.extend_seq_lens_cpu

    @property
    def splits(self) -> bool:
        return self.step is not None and self.step.rest is not None

    def leave_split(self) -> None:
        """A layer runs on a batch that is unknown to the split step: give the step to the host,
        whose metadata covers only a part of the batch.
        """
        if self.step is not None and self.splits:
            self.log.warn("a layer of a mixed step runs on an unknown copy of its batch")
            self.give_up(self.step, None)

    def run(self, call: LayerCall) -> Any:
        step = self.step
        assert step is not None
        if self._needs_host(call):
            return self._run_in_host(call, step)
        try:
            if call.save_kv_cache:
                self._write_kv(call, step)
                # The pool divides keys and values for 8 bits in place: nobody may write them again.
                call.save_kv_cache = False
            out = self._attend(call, step)
        except Exception as error:
            self.give_up(step, error)
            return self._run_in_host(call, step)
        out = self._whole(out, call, step)
        if self._verify and not step.captured:
            theirs = self._run_in_host(call, step)
            if not self._agree(out, theirs, call, step):
                return theirs
        if step.ran is not None:
            ran, step.ran, step.failed = step.ran, None, None
            ran()
        return out

    def give_up(self, step: TreeStep, error: Exception | None) -> None:
        """The host's kernel runs the step's other layers, and all later steps; logs an `error`."""
        if step.failed is not None:
            step.failed()
        if error is not None:
            self.failure.kernel_failed(error)
        self.host_in_graphs |= step.captured
        self._make_host_ready(step, step.batch)
        self.step = None

    def _whole(self, out: torch.Tensor, call: LayerCall, step: TreeStep) -> torch.Tensor:
        """[T, Hq * D]: the host's rows of a mixed step, ours, and zeros.

        The host may pad a step's tokens, to a multiple of the attention's ranks or for a graph.
        """
        parts = [out.flatten(1)]
        if step.rest is not None:
            first = step.first
            self._make_host_ready(step, step.rest)
            tensors = call.q[:first], call.k[:first], call.v[:first]
            others = LayerCall(*tensors, call.layer, step.rest, call.save_kv_cache, call.others)
            parts.insert(0, others.by(self.host.forward_extend).reshape(first, -1))
        missing = call.q.shape[0] - sum(part.shape[0] for part in parts)
        if missing:
            parts.append(parts[-1].new_zeros((missing, parts[-1].shape[1])))
        return torch.cat(parts) if parts[1:] else parts[0]

    def _agree(
        self, out: torch.Tensor, theirs: torch.Tensor, call: LayerCall, step: TreeStep
    ) -> bool:
        assert step.inputs is not None
        rows = step.first + step.inputs.rows
        eight_bits = self.pool.get_key_buffer(call.layer.layer_id).dtype.itemsize == 1
        found = differ(out[:rows], theirs.view(out.shape)[:rows], eight_bits=eight_bits)
        if found is not None:
            self.failure.results_differ(*found)
            self.give_up(step, None)
        return found is None

    def _run_in_host(self, call: LayerCall, step: TreeStep) -> Any:
        self.host_in_graphs |= step.captured
        self._make_host_ready(step, step.batch)
        decodes = step.batch.forward_mode.is_decode()
        return call.by(self.host.forward_decode if decodes else self.host.forward_extend)

    def _make_host_ready(self, step: TreeStep, batch: Any) -> None:
        """Have the host make its metadata for the step's batch, or for a part of it."""
        if step.prepared is not batch:
            self.host.init_forward_metadata(batch)
            step.prepared = batch

    def _needs_host(self, call: LayerCall) -> bool:
        """Whether the host's kernel runs this call. A layer's first call decides and is logged."""
        layer = call.layer
        if layer.layer_id not in self._reasons:
            reason = self._reasons[layer.layer_id] = self._host_reason(call)
            if reason is not None:
                self._left += 1
                self.state.device_tree_layers = self.tree_layers
                self.log.layers_left(reason)
        return (
            self._reasons[layer.layer_id] is not None
            or call.k is None
            or call.v is None
            or self._unknown_argument(call) is not None
        )

    def _unknown_argument(self, call: LayerCall) -> str | None:
        """An argument that asks for what tree attention does not compute, or None."""
        for name, value in call.others.items():
            if value is not None and name not in self.known_arguments:
                return f"the argument {name}"
        return None

    @abstractmethod
    def _host_reason(self, call: LayerCall) -> str | None:
        """Why the host's kernel runs a layer, by its first call; None if tree attention does."""

    @abstractmethod
    def _write_kv(self, call: LayerCall, step: TreeStep) -> None:
        """Write the keys and values of a step's tokens as the host does."""

    @abstractmethod
    def _attend(self, call: LayerCall, step: TreeStep) -> torch.Tensor:
        """[rows, Hq, D]: the attention of the step's planned rows in one layer."""


class TreeLayers(StepLayers):
    """Later layers of an eager step repeat the launches of the layer before."""

    known_arguments = ("sinks",)
    attention: TreeAttention

    @cached_property
    def repeats(self) -> Repeats:
        return Repeats(self.attention, self.log, verify=self._verify)

    def _host_reason(self, call: LayerCall) -> str | None:
        planned = next(iter(self.division.tree.values()))
        reason = unsupported_layer(call.layer, planned) or self._unknown_argument(call)
        if reason is None and (call.k is None or call.v is None):
            reason = "keys and values of another layer"
        return reason

    def _scales(self, layer: Any) -> tuple[Any, ...]:
        eight_bits = self.attention.kv_dtype != self.attention.dtype
        return (layer.k_scale, layer.v_scale) if eight_bits else ()

    def _write_kv(self, call: LayerCall, step: TreeStep) -> None:
        """Write the step's keys and values as the host does: it divides by the scales first."""
        k, v, scales = call.k, call.v, self._scales(call.layer)
        divides = any(scale is not None for scale in scales)
        if divides and not step.batch.forward_mode.is_decode():
            # The pool divides in place. If tree attention fails, the host's kernel for drafts still
            # reads these keys and values.
            k, v = k.clone(), v.clone()
        slots = step.batch.out_cache_loc
        if step.rest is not None and len(k) > len(slots):  # a prefill graph pads
            k, v = k[: len(slots)], v[: len(slots)]
        self.pool.set_kv_buffer(call.layer, self._location(slots, None), k, v, *scales)

    def _attend(self, call: LayerCall, step: TreeStep) -> torch.Tensor:
        layer, inputs = call.layer, step.inputs
        assert inputs is not None
        scales = self._scales(layer) or (1.0, 1.0)
        k_scale, v_scale = (self.attention.unit_scale if s is None else s for s in scales)
        q = call.q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        q = q[step.first : step.first + inputs.rows]
        # The pool waits for keys and values on their way to the device.
        keys = self.pool.get_key_buffer(layer.layer_id)
        values = self.pool.get_value_buffer(layer.layer_id)
        of_layer: dict[str, Any] = {"sm_scale": layer.scaling, "logit_cap": layer.logit_cap or 0.0}
        of_layer |= {"k_scale": k_scale, "v_scale": v_scale, "sinks": call.others.get("sinks")}
        out, size = torch.empty_like(q), (inputs.rows.bit_length(), inputs.query_tokens)
        addresses = layer_addresses(keys, values, **of_layer)
        # Graphs hold full runs: a replay costs the CPU nothing in any case.
        if step.captured or not self.repeats.repeat(addresses, q, out, size):
            of_layer |= {"table_rows": inputs.table_rows, "ancestors": inputs.ancestors}
            given = (q, keys, values, self.page_table, inputs.seq_lens)
            full = partial(self.attention.run, *given, **of_layer, out=out)
            self.repeats.run(full, addresses, q, out, size)
        return out

"""The attention backend: tree attention decodes and verifies; the host's backend does the rest.

Two subclasses decide which batches tree attention decodes, and which planner plans them:
``host_planned.py`` and ``device_planned.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from deft_backend.attention import TreeAttention
from deft_backend.hosts.sglang.start.layers import unsupported_layer
from deft_backend.hosts.sglang.step.verification import Verification
from deft_backend.hosts.sglang.versions import read_end
from deft_backend.telemetry.state import ServerState

logger = logging.getLogger("deft_backend")


class DeftAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Holds the host's own backend and delegates to it everything except tree attention.

    Subclasses set `_tree_batch` to the batch that the plan on the device covers. The host's
    metadata is made only if some layer needs the host's kernel. If a kernel fails, a log line gives
    the error and the host's kernel decodes from then on.

    Parameters
    ----------
    host : AttentionBackend
        The host's own decode backend.
    attention : TreeAttention
        Sized for the model's layers.
    state : ServerState
        Receives the counters.
    model_asks : bool
        Whether the model itself calls methods of its attention backend, which may read the host's
        metadata. Then the host makes the metadata in every step.
    verification : Verification, optional
        For servers that speculate.
    """

    _own = frozenset({
        "_host", "_attention", "_state", "_pool", "_req_to_token", "_layers", "_left", "_said",
        "_broken",
        "_tree_batch", "_capturing", "_host_in_graphs", "_host_ready", "_model_asks",
        "_verification",
    })  # fmt: skip
    """Attributes of this class; all others are the host's backend's."""

    @property
    def _static_launch(self) -> bool:
        """Whether to launch every kernel that any plan may need: the CPU does not know the plan."""
        return self._capturing

    def __init__(
        self,
        host: AttentionBackend,
        attention: TreeAttention,
        state: ServerState,
        *,
        model_asks: bool = False,
        verification: Verification | None = None,
    ) -> None:
        self._host = host
        self._verification = verification
        self._attention = attention
        self._state = state
        self._pool = host.token_to_kv_pool
        self._req_to_token = host.req_to_token_pool.req_to_token
        self._layers: dict[int, str | None] = {}
        self._left: set[int] = set()  # layers that turned out to need the host's kernel
        self._said: set[str] = set()
        self._broken: str | None = None
        self._tree_batch: Any = None
        self._capturing = False  # the running forward is captured with tree attention
        self._model_asks = model_asks
        # Whether any layer in graphs with tree attention reads the host's metadata.
        self._host_in_graphs = model_asks
        self._host_ready = False  # whether the host's metadata belongs to that batch

    def forward(
        self,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        if forward_batch is not None and self._planned_for(forward_batch):
            return self._tree_layer(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._host.forward(
            q=q, k=k, v=v, layer=layer, forward_batch=forward_batch, save_kv_cache=save_kv_cache,
            **kwargs,
        )  # fmt: skip

    def forward_decode(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        if self._planned_for(forward_batch):
            return self._tree_layer(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._host.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        if self._planned_for(forward_batch):  # a verification
            return self._tree_layer(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._host.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _planned_for(self, forward_batch: Any) -> bool:
        """Whether the plan on the device covers this batch."""
        return forward_batch is self._tree_batch

    def _tree_layer(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run a layer of a tree-attention step; the host's kernel runs it if it must."""
        if self._delegated(k, v, layer, kwargs) is None:
            try:
                if save_kv_cache:
                    self._write_kv(k, v, layer, forward_batch)
                    # The pool divides keys and values for 8 bits in place: nobody may write them
                    # a second time.
                    save_kv_cache = False
                return self._tree_attention(q, layer, forward_batch, kwargs.get("sinks"))
            except Exception as error:
                self._broken = "kernel failed"
                logger.error("deft: a kernel failed, the host's own decode from here: %r", error)
        self._host_in_graphs |= self._capturing
        if not self._host_ready:
            self._host.init_forward_metadata(forward_batch)
            self._host_ready = True
        if self._broken is not None:
            self._tree_batch = None  # also for the later layers of this step
        decodes = forward_batch.forward_mode.is_decode()
        host = self._host.forward_decode if decodes else self._host.forward_extend
        return host(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def reads_during_forward(self) -> bool:
        """Whether the current decode step reads page tables until it ends."""
        raise NotImplementedError

    def shared_read_ends(self, mode: Any) -> Any:
        """When a replay has read what the scheduler writes (SGLang asks from 0.5.18 on).

        Tree attention reads a shared prefix through one request's row, in every layer. So the host
        must not write page tables before the forward ends.
        """
        if self._is_step(mode) and self.reads_during_forward():
            return read_end()
        return self._host.shared_read_ends(mode)

    def _is_step(self, mode: Any) -> bool:
        """Whether a batch of this mode may go through tree attention."""
        return bool(
            mode.is_decode() or (self._verification is not None and mode.is_target_verify())
        )

    def forward_mixed(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.forward_mixed(*args, **kwargs)

    def _scales(self, layer: Any) -> tuple[Any, ...]:
        """The scales of a layer's keys and values, if the cache has 8 bits."""
        eight_bits = self._attention.kv_dtype != self._attention.dtype
        return (layer.k_scale, layer.v_scale) if eight_bits else ()

    def _write_kv(self, k: Any, v: Any, layer: Any, forward_batch: Any) -> None:
        """Write the step's keys and values as the host does: it divides by the scales first."""
        location, scales = KVWriteLoc(forward_batch.out_cache_loc, None), self._scales(layer)
        divides = any(scale is not None for scale in scales)
        if divides and self._verification is not None:
            # The pool divides in place. If tree attention fails, the host's kernel for drafts still
            # reads these keys and values.
            k, v = k.clone(), v.clone()
        self._pool.set_kv_buffer(layer, location, k, v, *scales)

    def _tree_attention(self, q: Any, layer: Any, forward_batch: Any, sinks: Any) -> Any:
        scales = self._scales(layer)
        k_scale, v_scale = (
            (self._attention.unit_scale if scale is None else scale for scale in scales)
            if scales
            else (1.0, 1.0)
        )
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        seq_lens, ancestors = self._context(forward_batch)
        q = q.reshape(-1, heads, dim)
        # The host may pad tokens to a multiple of the attention's ranks. It may also pad a draft
        # model's requests after they are planned.
        requests = len(seq_lens)
        rows = requests
        if self._verification is not None and not forward_batch.forward_mode.is_decode():
            rows *= self._verification.query_tokens
        out = self._attention.run(
            q[:rows],
            self._pool.get_key_buffer(layer.layer_id),
            self._pool.get_value_buffer(layer.layer_id),
            self._req_to_token,
            seq_lens,
            table_rows=forward_batch.req_pool_indices[:requests],
            ancestors=ancestors,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap or 0.0,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            static_launch=self._static_launch,
        )
        if rows < len(q):
            out = torch.cat([out, torch.zeros_like(q[rows:])])
        return out.view(-1, heads * dim)

    def _context(self, forward_batch: Any) -> tuple[Any, Any]:
        """Tokens of each request, the step's included; and the ancestors of query tokens."""
        if self._verification is not None and not forward_batch.forward_mode.is_decode():
            return self._verification.seq_lens, self._verification.ancestors
        return forward_batch.seq_lens, None

    def _delegated(self, k: Any, v: Any, layer: Any, kwargs: dict[str, Any]) -> str | None:
        """Why this layer of a tree step runs in the host's kernel, or None."""
        if layer.layer_id not in self._layers:
            state = self._state
            reason = unsupported_layer(
                layer, (state.num_query_heads, state.num_kv_heads, state.head_dim)
            )
            extra = sorted(name for name in kwargs if _unknown(name, kwargs[name]))
            if reason is None and extra:
                reason = f"the argument {extra[0]}"
            if reason is None and (k is None or v is None):
                reason = "keys and values of another layer"
            self._layers[layer.layer_id] = reason
            if reason is not None:
                self._left.add(layer.layer_id)
                self._state.device_tree_layers = self._state.num_layers - len(self._left)
                self._say(f"layers with {reason} decode through the host's kernel")
        reason = self._layers[layer.layer_id]
        unknown = any(_unknown(name, value) for name, value in kwargs.items())
        if reason is None and (k is None or v is None or unknown):
            return "unexpected arguments"
        return reason

    def leave_layers(self, reasons: Mapping[int, str]) -> None:
        """Run these layers in the host's kernel, for reasons that the log has given already."""
        self._layers.update(reasons)

    def _say(self, message: str, kind: str | None = None) -> None:
        """Log one line for each `kind`, even if later lines hold other numbers."""
        if (kind or message) not in self._said:
            self._said.add(kind or message)
            logger.warning("deft: %s", message)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """``isinstance`` also sees the host's backend class here, because models ask for it."""
        return type(self.__dict__.get("_host", self))

    def _begin_tree_step(self, forward_batch: Any) -> None:
        """Decode the eager step that begins now with tree attention."""
        self._tree_batch = forward_batch
        self._host_ready = self._model_asks
        if self._model_asks:
            self._host.init_forward_metadata(forward_batch)

    def __getattr__(self, name: str) -> Any:
        if name == "_host":  # `_host` is not set yet
            raise AttributeError(name)
        return getattr(self._host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._host, name, value)


def _unknown(name: str, value: Any) -> bool:
    """Whether an argument of a layer's call asks for what tree attention does not compute."""
    return value is not None and name != "sinks"


def _hand_on(name: str) -> property:
    def get(self: DeftAttentionBackend) -> Any:
        return getattr(self._host, name)

    return property(get)


# Members that the host's base class defines must come from the wrapped backend, not from the base.
# The set of these members differs between host versions.
for _name in dir(AttentionBackend):
    if not _name.startswith(("__", "_abc")) and _name not in vars(DeftAttentionBackend):
        setattr(DeftAttentionBackend, _name, _hand_on(_name))

"""The attention backend: the host's own one, with decode batches that share taken out of it."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from deft_backend.attention import TreeAttention
from deft_backend.hosts.sglang.capture import BatchCapture
from deft_backend.hosts.sglang.decode_plan import DecodePlanner, Planned
from deft_backend.hosts.sglang.layers import unsupported_layer
from deft_backend.hosts.sglang.radix_forest import known_tree
from deft_backend.hosts.state import ServerState

logger = logging.getLogger("deft_backend")


class Decision(NamedTuple):
    """Which kernel decodes a step."""

    rids: Any
    """The batch's own list of request ids, which the host makes anew each step."""
    slots: Any
    """The batch's tensor of slots for the new tokens, which graphs' views of it share."""
    taken: bool
    """Tree attention, not the host's kernel."""


class DeftAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Composition around the host's own backend, to which everything else is handed on.

    A decode batch goes through tree attention if its requests are known (it was made by the
    scheduler, not for warm-up or capture), its radix tree can be read, and it shares enough.
    The host's metadata is then made only if some layer needs the host's kernel after all.
    Whatever goes wrong while deciding costs a line in the log and the host's kernel for the step.

    Parameters
    ----------
    host : AttentionBackend
        The host's own decode backend.
    attention : TreeAttention
        Sized for the model's layers.
    planner : DecodePlanner
    capture : BatchCapture
        Gives the scheduler's requests behind a forward batch.
    state : ServerState
        Receives the counters.
    """

    needs_cpu_seq_lens = True  # the forest is built from them

    def __init__(
        self,
        host: AttentionBackend,
        attention: TreeAttention,
        planner: DecodePlanner,
        capture: BatchCapture,
        state: ServerState,
    ) -> None:
        self._host = host
        self._attention = attention
        self._planner = planner
        self._capture = capture
        self._state = state
        self._pool = host.token_to_kv_pool
        self._req_to_token = host.req_to_token_pool.req_to_token
        self._layers: dict[int, str | None] = {}
        self._said: set[str] = set()
        self._broken: str | None = None
        self._tree_batch: Any = None  # the batch that is decoded through the current plan
        self._decided: Decision | None = None
        self._capturing = False  # the forward that runs is captured with tree attention
        self._host_in_graphs = False  # some layer of those graphs is the host's kernel
        self._host_ready = False  # whether the host's metadata is that batch's

    # -- metadata ---------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._tree_batch = None
        taken = forward_batch.forward_mode.is_decode() and self.takes(forward_batch)
        self._decided = None  # the step begins
        if taken:
            self._tree_batch = forward_batch
            self._host_ready = False
            return
        self._host.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._tree_batch = None
        if in_capture and self._capturing:
            self._tree_batch = forward_batch
        if not in_capture and self._replays_tree(forward_batch):
            return
        self._host.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._host_ready = True

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._host.init_forward_metadata_in_graph(forward_batch)

    def takes(self, forward_batch: Any) -> bool:
        """Whether a decode batch goes through tree attention; decided and counted once a batch.

        Asked before the host chooses between its graph and an eager step, and again when the
        eager step begins. A batch is told by its list of ids, which the host makes anew each step.
        """
        rids = forward_batch.rids
        if rids is None or self._decided is None or self._decided.rids is not rids:
            slots = forward_batch.out_cache_loc
            self._decided = Decision(rids, slots, self._decide(forward_batch))
        return self._decided.taken

    def capture_tree(self, capturing: bool) -> None:
        """The forwards from now on are captured with tree attention, or no longer.

        What is captured are launches that read whatever plan is on the device. Until then it is
        empty: the batch of a capture is none that a plan was made for. The host may capture again
        between two steps, or within one, so the plan in use comes back afterwards.
        """
        self._capturing = capturing
        self._tree_batch = None
        if capturing:
            self._attention.clear_plan()
        else:
            self._attention.restore_plan()

    def _replays_tree(self, view: Any) -> bool:
        """Whether a graph's replay is one of tree attention that needs no metadata of the host.

        The host shows a view of the batch that was decided on, with the same tensor of slots.
        """
        decided = self._decided
        return (
            decided is not None
            and decided.taken
            and view.forward_mode.is_decode()
            and view.out_cache_loc is decided.slots
            and not self._host_in_graphs  # the host's kernel reads the host's metadata
        )

    def _decide(self, forward_batch: Any) -> bool:
        """Whether the batch goes through tree attention; plans and counts it."""
        lens = forward_batch.seq_lens_cpu
        if lens is None:
            self._say("the host keeps no sequence lengths in host memory")
            return False
        seq_lens = lens.numpy()
        tokens = forward_batch.seq_lens_sum
        tokens = int(seq_lens.sum()) if tokens is None else int(tokens)
        try:
            planned = self._plan(forward_batch, seq_lens, tokens)
        except Exception as error:
            self._planner.forget()
            self._say(f"planning failed ({error!r}); the host's kernel decodes such batches")
            logger.debug("deft: planning failed", exc_info=True)
            planned = "planning failed"
        if isinstance(planned, str):
            self._state.count_host(planned, tokens)
            return False
        tree_layers = self._state.num_layers - sum(r is not None for r in self._layers.values())
        self._state.count_tree(tokens, planned.loads(tokens), tree_layers)
        return True

    def _plan(self, forward_batch: Any, seq_lens: Any, tokens: int) -> Planned | str:
        """The plan for this step, or why the host's kernel decodes it."""
        if self._broken is not None:
            return self._broken
        captured = self._capture.of(forward_batch)
        if captured is None:
            return "no requests behind the batch"
        if len(captured.requests) != forward_batch.batch_size:
            return "padded batch"
        if len(seq_lens) != forward_batch.batch_size:
            return "padded batch"
        unknown = known_tree(captured.tree_cache)
        if unknown is not None:
            self._say(f"{unknown}; the host's kernel decodes")
            return "unknown tree cache"
        planned = self._planner.step(captured.requests, seq_lens, tokens, forward_batch)
        return planned if planned.host_reason is None else planned.host_reason

    # -- attention --------------------------------------------------------------------------

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
        if forward_batch is not None and forward_batch is self._tree_batch:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
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
        host = self._host.forward_decode
        if forward_batch is not self._tree_batch:
            return host(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if self._delegated(k, v, layer, kwargs) is None:
            try:
                return self._tree_decode(q, k, v, layer, forward_batch, save_kv_cache)
            except Exception as error:
                self._broken = "kernel failed"
                logger.error("deft: a kernel failed, the host's own decode from here: %r", error)
        self._host_in_graphs |= self._capturing
        if not self._host_ready:
            self._host.init_forward_metadata(forward_batch)
            self._host_ready = True
        if self._broken is not None:
            self._tree_batch = None  # the later layers of this step, too
        return host(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.forward_extend(*args, **kwargs)

    def forward_mixed(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.forward_mixed(*args, **kwargs)

    def _tree_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> Any:
        if save_kv_cache:
            self._pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        out = self._attention.run(
            q.reshape(-1, heads, dim),
            self._pool.get_key_buffer(layer.layer_id),
            self._pool.get_value_buffer(layer.layer_id),
            self._req_to_token,
            forward_batch.seq_lens,
            table_rows=forward_batch.req_pool_indices,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap or 0.0,
            static_launch=self._capturing,
        )
        return out.view(-1, heads * dim)

    def _delegated(self, k: Any, v: Any, layer: Any, kwargs: dict[str, Any]) -> str | None:
        """Why this layer of a tree step runs in the host's kernel, or None."""
        if layer.layer_id not in self._layers:
            state = self._state
            reason = unsupported_layer(
                layer, state.num_query_heads, state.num_kv_heads, state.head_dim
            )
            extra = sorted(name for name, value in kwargs.items() if value is not None)
            if reason is None and extra:
                reason = f"the argument {extra[0]}"
            if reason is None and (k is None or v is None):
                reason = "keys and values of another layer"
            self._layers[layer.layer_id] = reason
            if reason is not None:
                self._say(f"layers with {reason} decode through the host's kernel")
        reason = self._layers[layer.layer_id]
        given = (value is not None for value in kwargs.values())
        if reason is None and (k is None or v is None or any(given)):
            return "unexpected arguments"
        return reason

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("deft: %s", message)

    # -- everything else --------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "_host":  # not constructed yet
            raise AttributeError(name)
        return getattr(self._host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._host, name, value)


_OWN = frozenset({
    "_host", "_attention", "_planner", "_capture", "_state", "_pool", "_req_to_token", "_layers",
    "_said", "_broken", "_tree_batch", "_decided", "_capturing",
    "_host_in_graphs", "_host_ready",
})  # fmt: skip


def _hand_on(name: str) -> property:
    def get(self: DeftAttentionBackend) -> Any:
        return getattr(self._host, name)

    return property(get)


# Members that the host's base class defines must be the wrapped backend's, not the base's. Which
# ones there are differs between versions of the host.
for _name in dir(AttentionBackend):
    if not _name.startswith(("__", "_abc")) and _name not in vars(DeftAttentionBackend):
        setattr(DeftAttentionBackend, _name, _hand_on(_name))

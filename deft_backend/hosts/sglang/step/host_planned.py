"""Decode batches that the host planner plans when their composition changes."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from deft_backend.attention import TreeAttention
from deft_backend.hosts.sglang.step.backend import DeftAttentionBackend
from deft_backend.hosts.sglang.step.batch_observer import BatchObserver
from deft_backend.hosts.sglang.step.decode_plan import DecodePlanner, Planned
from deft_backend.telemetry.state import ServerState

logger = logging.getLogger("deft_backend")


class Decision(NamedTuple):
    """Which kernel decodes a step."""

    rids: Any
    """The batch's own list of request ids; the host makes a new list in each step."""
    slots: Any
    """The batch's tensor of page ids for the new tokens; a graph's view of the batch shares it."""
    taken: bool
    """Whether tree attention decodes the step, not the host's kernel."""


class HostPlannedBackend(DeftAttentionBackend):
    """Sends a decode batch through tree attention if the scheduler made it and it shares enough.

    Batches of a warm-up or a capture do not come from the scheduler. If the decision fails, a log
    line gives the error and the host's kernel decodes the step.

    Parameters
    ----------
    host : AttentionBackend
        The host's own decode backend.
    attention : TreeAttention
        Sized for the model's layers.
    planner : DecodePlanner
    observer : BatchObserver
        Gives the scheduler's requests behind a forward batch.
    state : ServerState
        Receives the counters.
    model_asks : bool
        See :class:`~deft_backend.hosts.sglang.step.backend.DeftAttentionBackend`.
    """

    needs_cpu_seq_lens = True  # the CPU builds the forest from them
    _own = DeftAttentionBackend._own | {"_planner", "_observer", "_decided"}

    def __init__(
        self,
        host: Any,
        attention: TreeAttention,
        planner: DecodePlanner,
        observer: BatchObserver,
        state: ServerState,
        *,
        model_asks: bool = False,
    ) -> None:
        super().__init__(host, attention, state, model_asks=model_asks)
        self._planner = planner
        self._observer = observer
        self._decided: Decision | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._tree_batch = None
        taken = forward_batch.forward_mode.is_decode() and self.takes(forward_batch)
        # The host may pad a batch after the decision.
        taken = taken and forward_batch.batch_size == len(forward_batch.rids)
        self._decided = None  # the step begins
        if taken:
            self._begin_tree_step(forward_batch)
            return
        self._host.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._tree_batch = None
        if in_capture and self._capturing:
            self._tree_batch = forward_batch
        if not in_capture and self._replays_tree(forward_batch):
            return
        # The host has just captured its own graph of this size. If told of a second capture, some
        # backends (FlashInfer) make new buffers for the size. From then on they fill the new
        # buffers, but their graph reads the old ones.
        in_capture = in_capture and not self._capturing
        self._host.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._host_ready = True

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._host.init_forward_metadata_in_graph(forward_batch)

    def takes(self, forward_batch: Any) -> bool:
        """Whether tree attention decodes a batch; decided and counted once for each batch.

        The host asks before it chooses between its graph and an eager step, and again when the
        eager step begins. The list of ids identifies the batch, because the host makes a new list
        in each step.
        """
        rids = forward_batch.rids
        if rids is None or self._decided is None or self._decided.rids is not rids:
            slots = forward_batch.out_cache_loc
            self._decided = Decision(rids, slots, self._decide(forward_batch))
        return self._decided.taken

    def capture_tree(self, capturing: bool) -> None:
        """The host captures the next forwards with tree attention, or without it again.

        The captured launches read the plan on the device. During the capture that plan is empty,
        because no plan covers the capture's batch. The host may capture again between two steps, or
        within one, so the plan in use is restored afterwards.
        """
        self._capturing = capturing
        self._tree_batch = None
        if capturing:
            self._attention.clear_plan()
        else:
            self._attention.restore_plan()

    def reads_during_forward(self) -> bool:
        """Whether the current decode step reads page tables until it ends.

        The host asks after it has chosen the graph. Without a decision the answer is yes.
        """
        return self._decided is None or self._decided.taken

    def replayed_tree(self, forward_batch: Any) -> bool:
        """Whether the graph replayed for a batch reads page tables while it runs."""
        return bool(forward_batch.forward_mode.is_decode()) and self.takes(forward_batch)

    def _replays_tree(self, view: Any) -> bool:
        """Whether a replay holds tree attention and needs no metadata of the host.

        The host passes a view of the decided batch, with the same tensor of page ids.
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
            self._say("the host keeps no sequence lengths in CPU memory")
            return False
        seq_lens = lens.numpy()
        tokens = forward_batch.seq_lens_sum
        tokens = int(seq_lens.sum()) if tokens is None else int(tokens)
        try:
            planned = self._plan(forward_batch, seq_lens, tokens)
        except Exception as error:
            self._say(
                f"planning failed ({error!r}); the host's kernel decodes such batches",
                kind=f"planning failed {type(error).__name__}",
            )
            logger.debug("deft: planning failed", exc_info=True)
            planned = "planning failed"
        if isinstance(planned, str):
            self._state.count_host(planned, tokens)
            return False
        tree_layers = self._state.num_layers - len(self._left)
        self._state.count_tree(tokens, planned.loads(tokens), tree_layers)
        return True

    def _plan(self, forward_batch: Any, seq_lens: Any, tokens: int) -> Planned | str:
        """The plan for this step, or why the host's kernel decodes it."""
        if self._broken is not None:
            return self._broken
        observed = self._observer.of(forward_batch)
        if observed is None:
            return "no requests behind the batch"
        if len(observed.requests) != forward_batch.batch_size:
            return "padded batch"
        if len(seq_lens) != forward_batch.batch_size:
            return "padded batch"
        planned = self._planner.step(observed, seq_lens, tokens, forward_batch)
        return planned if planned.host_reason is None else planned.host_reason

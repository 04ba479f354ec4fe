"""Batches that the device planner plans from the page table in every step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.sglang.step.backend import DeftAttentionBackend
from deft_backend.hosts.sglang.step.verification import Verification
from deft_backend.settings.config import Settings
from deft_backend.telemetry.shown_batch import Batch
from deft_backend.telemetry.state import ServerState

logger = logging.getLogger("deft_backend")


class DevicePlannedBackend(DeftAttentionBackend):
    """Every batch of DEFT_MIN_BATCH requests or more decodes or verifies with tree attention.

    Planning consists of launches only, which run in the step and are recorded into its graph. So
    each step plans from the current page table, and the CPU does no work for it. Changes of
    requests, tree nodes or pages between steps need no notice. Unshared KV takes hardly longer than
    in the host's kernel, so only the number of requests decides.

    Parameters
    ----------
    host : AttentionBackend
        The host's own decode backend.
    attention : TreeAttention
        Sized for the model's layers.
    state : ServerState
        Receives the counters that the device keeps.
    settings : Settings
        Their limits on batches.
    shows : bool
        Whether to keep the last batch, so that ``deft explain`` can show what it shares.
    model_asks : bool
        See :class:`~deft_backend.hosts.sglang.step.backend.DeftAttentionBackend`.
    compile_for : callable, optional
        Takes the dtypes of table rows and of sequence lengths, and compiles the kernels for them,
        unless they are compiled. Called before a capture: nothing may be compiled within one.
    verification : Verification, optional
        See :class:`~deft_backend.hosts.sglang.step.backend.DeftAttentionBackend`.
    """

    _own = DeftAttentionBackend._own | {
        "_settings", "_shows", "_tree_graphs", "_table_readers", "_replayed_tree", "_counting",
        "_recaptures", "_compile_for",
    }  # fmt: skip

    def __init__(
        self, host: Any, attention: TreeAttention, state: ServerState, settings: Settings,
        *, shows: bool = True, model_asks: bool = False,
        compile_for: Callable[[torch.dtype, torch.dtype], None] | None = None,
        verification: Verification | None = None,
    ) -> None:  # fmt: skip
        super().__init__(host, attention, state, model_asks=model_asks, verification=verification)
        self._settings = settings
        self._shows = shows
        self._compile_for = compile_for
        # Batch sizes whose last captured graph holds tree attention, and sizes of which an earlier
        # graph held it. An earlier graph reads page tables while it runs, even if the last one does
        # not.
        self._tree_graphs: set[int] = set()
        self._table_readers: set[int] = set()
        self._replayed_tree = False
        self._counting = False
        self._recaptures = False  # the host captures again and has decoded no step since

    @property
    def _static_launch(self) -> bool:
        return True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """An eager step begins."""
        self._tree_batch = None
        self._capturing = False
        if not self._is_step(forward_batch.forward_mode):
            self._host.init_forward_metadata(forward_batch)
            return
        self._attach_counters()
        reason = self._reason(forward_batch.batch_size) or self._unsuitable(forward_batch)
        if reason is None:
            self._load_links(forward_batch)
        if reason is None and self._planned(forward_batch):
            self._show(forward_batch)
            self._count_verified(forward_batch)
            self._begin_tree_step(forward_batch)
            return
        self._count_host(reason or "planning failed", forward_batch)
        self._host.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a capture or a replay; only captures show which graphs hold tree attention."""
        self._tree_batch = None
        self._capturing = False
        self._replayed_tree = False
        size = forward_batch.batch_size
        is_step = self._is_step(forward_batch.forward_mode)
        if in_capture and is_step:
            self._count_replays(False)
            # The host captures a size again for LoRA adapters, and when its weights have changed.
            if size in self._tree_graphs:
                self._table_readers.add(size)
                self._tree_graphs.remove(size)
            reason = self._reason(size) or self._unsuitable(forward_batch, captured=True)
            if reason is None and self._compiled_for(forward_batch):
                self._tree_batch = forward_batch
                self._capturing = True
                self._tree_graphs.add(size)
        if not in_capture and is_step:
            self._attach_counters()
            self._replayed_tree = size in self._tree_graphs or size in self._table_readers
            if size not in self._tree_graphs:
                self._count_host(self._reason(size) or "no graph", forward_batch)
            else:
                self._load_links(forward_batch)
                self._show(forward_batch)
                self._count_verified(forward_batch)
                if not self._host_in_graphs:
                    return
        self._host.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._host_ready = True

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Launch the planning: recorded during a capture, run in the warm-up before it."""
        if forward_batch is self._tree_batch:
            self._planned(forward_batch)
        self._host.init_forward_metadata_in_graph(forward_batch)

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Load the links once more: the host may prepare a replay before it has drafted.

        It prepares eager steps after it has drafted.
        """
        tree = self._verification is not None and cuda_graph_bs in self._tree_graphs
        if tree and spec_info is not None:  # an idle rank has none
            assert self._verification is not None
            self._verification.load(spec_info)
        self._host.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def reads_during_forward(self) -> bool:
        """Whether a decode step reads page tables until it ends.

        The host asks before it names the graph that it replays. So the answer is yes as soon as one
        graph holds tree attention.
        """
        return bool(self._tree_graphs or self._table_readers)

    def replayed_tree(self, forward_batch: Any) -> bool:
        """Whether the last replayed graph reads page tables while it runs."""
        return self._replayed_tree

    def _reason(self, batch: int) -> str | None:
        """Why the host's kernel decodes a batch of this size, or None."""
        if self._broken is not None:
            return self._broken
        return refused(batch, self._settings, self._attention.max_batch)

    def _verifies(self, forward_batch: Any) -> bool:
        """Whether a step verifies drafts."""
        return self._verification is not None and not forward_batch.forward_mode.is_decode()

    def _unsuitable(self, forward_batch: Any, *, captured: bool = False) -> str | None:
        """Why the host's kernel computes this step, whatever its size, or None."""
        if not self._verifies(forward_batch):
            return None
        assert self._verification is not None
        return self._verification.unsuitable(forward_batch, captured=captured)

    def _load_links(self, forward_batch: Any) -> None:
        """Load the links between a step's draft tokens; an idle rank has none."""
        if self._verifies(forward_batch) and forward_batch.spec_info is not None:
            assert self._verification is not None
            self._verification.load(forward_batch.spec_info)

    def _count_verified(self, forward_batch: Any) -> None:
        """Count the tokens that a step verifies."""
        if self._verifies(forward_batch):
            assert self._verification is not None
            requests = forward_batch.batch_size - getattr(forward_batch, "num_padding", 0)
            self._state.verified_tokens += requests * self._verification.query_tokens

    def _compiled_for(self, forward_batch: Any) -> bool:
        """Compile what this batch's tensors need; if that fails, the host's kernel decodes."""
        if self._compile_for is None:
            return True
        try:
            self._compile_for(forward_batch.req_pool_indices.dtype, forward_batch.seq_lens.dtype)
        except Exception as error:
            self._broken = "kernels not compiled"
            logger.error("deft: kernels do not compile, the host's own decode from here: %r", error)
            return False
        return True

    def _planned(self, forward_batch: Any) -> bool:
        """Launch the planning; if that fails, the host's kernel decodes from then on."""
        seq_lens, query_tokens = forward_batch.seq_lens, 1
        try:
            if self._verifies(forward_batch):
                assert self._verification is not None
                self._verification.prepare(forward_batch)
                seq_lens = self._verification.seq_lens
                query_tokens = self._verification.query_tokens
            self._attention.plan_on_device(
                self._req_to_token,
                seq_lens,
                table_rows=forward_batch.req_pool_indices,
                query_tokens=query_tokens,
            )
        except Exception as error:
            self._broken = "planning failed"
            self._tree_batch = None
            self._tree_graphs.discard(forward_batch.batch_size)  # in case it was being captured
            logger.error("deft: planning failed, the host's own decode from here: %r", error)
            logger.debug("deft: planning failed", exc_info=True)
            return False
        return True

    def _show(self, forward_batch: Any) -> None:
        """Keep the batch, so that ``deft explain`` can show what it shares."""
        if not self._shows:
            return
        self._state.batch = Batch(
            self._req_to_token, forward_batch.seq_lens, 1, forward_batch.req_pool_indices
        )

    def _count_host(self, reason: str, forward_batch: Any) -> None:
        """Count a step of the host's kernel; the device counts the steps of tree attention."""
        tokens = forward_batch.seq_lens_sum
        if tokens is None:
            lens = forward_batch.seq_lens_cpu
            tokens = 0 if lens is None else lens.sum()
        self._state.count_host(reason, int(tokens))

    def _attach_counters(self) -> None:
        """Count from the first step on, without the plans of warm-up and capture."""
        if not self._counting:
            self._counting = True
            counters = self._attention.device_planner.counters
            self._state.attach_device_counters(counters.numpy())
        elif self._recaptures:
            self._count_replays(True)

    def _count_replays(self, counted: bool) -> None:
        """Count steps, or stop: a server that has decoded counts none while it captures again."""
        if not self._counting or self._recaptures is not counted:
            return
        self._recaptures = not counted
        if self._attention.device.type == "cuda":
            torch.cuda.synchronize(self._attention.device)
        self._state.hold_device_counters(not counted)

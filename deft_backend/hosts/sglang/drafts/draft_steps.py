"""The draft model's decode steps: one plan for all steps of a draft.

The host drafts chains with one backend for each step, and a container that prepares all of them.
All steps run in one graph. A request's tokens grow by one from step to step, and its page table
lists the places of all its draft tokens from the start. So one plan serves every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.sglang.step.backend import DeftAttentionBackend
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState

logger = logging.getLogger("deft_backend")


def same_pass(forward_batch: Any, planned: Any) -> bool:
    """Whether a batch is the planned one. The host runs eager passes of a draft model with copies.

    A copy has the same object for what it speculates.
    """
    return planned is not None and forward_batch.spec_info is planned.spec_info


class DraftStep(DeftAttentionBackend):
    """The backend of one step; :class:`DraftSteps` plans for it and makes the host's metadata."""

    _own = DeftAttentionBackend._own | {"seq_lens", "_told"}

    def __init__(
        self, host: Any, attention: TreeAttention, state: ServerState, *, model_asks: bool = False
    ) -> None:
        super().__init__(host, attention, state, model_asks=model_asks)
        self._told = False
        self.seq_lens: torch.Tensor | None = None
        """[B]: tokens of each request in this step, once planned."""

    @property
    def _static_launch(self) -> bool:
        return True

    @property
    def failed(self) -> bool:
        """Whether a kernel failed."""
        return self._broken is not None

    @property
    def host_in_graphs(self) -> bool:
        """Whether a captured graph holds the host's kernel for some layer."""
        return self._host_in_graphs

    def begin(self, batch: Any, *, capturing: bool) -> None:
        """Decode this batch with tree attention from now on; None: decode none."""
        self._tree_batch = batch
        self._capturing = capturing
        self._host_ready = True

    def reads_during_forward(self) -> bool:
        return True

    def _planned_for(self, forward_batch: Any) -> bool:
        return same_pass(forward_batch, self._tree_batch)

    def _context(self, forward_batch: Any) -> tuple[Any, Any]:
        if not self._told:
            self._told = True
            logger.debug("deft: a draft's decode step runs through tree attention")
        return self.seq_lens, None


class DraftSteps:
    """Stands for the host's container of backends, and plans for its steps.

    Parameters
    ----------
    host
        The host's container.
    steps : sequence of DraftStep
        Around the container's backends, in order.
    attention : TreeAttention
        Of the draft model's layers.
    req_to_token : [rows, P] int32
        The page table.
    settings : Settings
        Their limits on batches.
    compile_for : callable, optional
        See :class:`~deft_backend.hosts.sglang.step.device_planned.DevicePlannedBackend`.
    """

    def __init__(
        self,
        host: Any,
        steps: Sequence[DraftStep],
        attention: TreeAttention,
        req_to_token: torch.Tensor,
        settings: Settings,
        compile_for: Callable[[torch.dtype, torch.dtype], None] | None = None,
    ) -> None:
        self._host = host
        self.attn_backends = list(steps)
        self._attention = attention
        self._req_to_token = req_to_token
        self._settings = settings
        self._compile_for = compile_for
        self._grown = torch.arange(1, len(steps) + 1, device=attention.device)[:, None]
        self._batch: Any = None
        self._graphs: set[int] = set()  # batch sizes whose graph holds tree attention
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        if name == "_host":
            raise AttributeError(name)
        return getattr(self._host, name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """An eager draft begins.

        The host changes the batch from step to step, so its metadata cannot be made later.
        """
        self._host.init_forward_metadata(forward_batch)
        self._begin(forward_batch if self._takes(forward_batch) else None)
        if self._batch is not None:
            self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a capture or a replay."""
        self._begin(None)
        size = forward_batch.batch_size
        if in_capture:
            self._graphs.discard(size)
            if self._takes(forward_batch) and self._compiled(forward_batch):
                self._begin(forward_batch, capturing=True)
                self._graphs.add(size)
        elif size in self._graphs and not any(step.host_in_graphs for step in self.attn_backends):
            return
        self._host.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Launch the planning: recorded during a capture, run in the warm-up before it."""
        if forward_batch is self._batch:
            self._plan(forward_batch)
        self._host.init_forward_metadata_in_graph(forward_batch)

    def _begin(self, batch: Any, *, capturing: bool = False) -> None:
        self._batch = batch
        for step in self.attn_backends:
            step.begin(batch, capturing=capturing)

    def _takes(self, forward_batch: Any) -> bool:
        """Whether tree attention decodes this draft."""
        if self._failed or any(step.failed for step in self.attn_backends):
            return False
        size = forward_batch.batch_size
        return refused(size, self._settings, self._attention.max_batch) is None

    def _plan(self, forward_batch: Any) -> None:
        """Launch the planning; if that fails, the host's kernels draft from then on."""
        try:
            lens = self._lens(forward_batch.seq_lens)
            self._attention.plan_on_device(
                self._req_to_token, lens[0], table_rows=forward_batch.req_pool_indices
            )
        except Exception as error:
            self._fail(f"a draft could not be planned, the host drafts from here: {error!r}")
            self._graphs.discard(forward_batch.batch_size)
            self._begin(None)
            return
        for step, held in zip(self.attn_backends, lens, strict=True):
            step.seq_lens = held

    def _lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """[steps, B] int64: the tokens of each request in each step. Each step adds a token.

        Rows begin at multiples of 16 bytes: the kernels are compiled for such pointers.
        """
        size = len(seq_lens)
        held = self._grown.new_empty((len(self._grown), size + size % 2))[:, :size]
        return torch.add(seq_lens, self._grown, out=held)

    def _compiled(self, forward_batch: Any) -> bool:
        """Compile what this batch's tensors need: nothing may be compiled within a capture."""
        if self._compile_for is None:
            return True
        try:
            self._compile_for(forward_batch.req_pool_indices.dtype, forward_batch.seq_lens.dtype)
        except Exception as error:
            self._fail(f"kernels do not compile, the host drafts from here: {error!r}")
            return False
        return True

    def _fail(self, message: str) -> None:
        self._failed = True
        logger.error("deft: %s", message)

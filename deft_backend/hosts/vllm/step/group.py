"""Tree attention of the layers that share a block table: vLLM's attention group."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from deft_backend.attention import TreeAttention
from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.vllm.start.layers import Layer, LayerShape
from deft_backend.hosts.vllm.start.layout import kv_views
from deft_backend.hosts.vllm.start.sleep import HIDDEN_BATCH
from deft_backend.settings.config import Settings
from deft_backend.telemetry.shown_batch import Batch
from deft_backend.telemetry.state import ServerState

logger = logging.getLogger("deft_backend")

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""For ``DEFT_VERIFY``: the largest difference allowed, relative to the largest value."""

EIGHT_BITS = 3
"""Factor of the tolerance with a cache of 8 bits: the host may multiply in 8 bits."""

SMALLEST = 1e-6
"""The tolerance is relative to no smaller value than this one, so that results of zero agree."""


class GroupAttention:
    """The :class:`TreeAttention` of one attention group, and the rules for its use.

    With the policy ``auto`` a step consists of launches only, so a captured graph can hold it. The
    device planner reads the host's tensors, and the CPU reads nothing back. On the CPU the same
    launches run in the interpreter, and the host planner offers the other policies.

    Parameters
    ----------
    attention : TreeAttention
        Sized for the group's layers and block size.
    settings : Settings
    state : ServerState
        Receives the counters.
    tree_layers : int
        Layers of the whole model that go through tree attention.
    counts : bool
        Whether this group counts the server's steps; exactly one group does.
    plans_on_device : bool
        Whether the device planner makes the plans; else the host planner does, from CPU memory.
    shows_batch : bool
        Whether other threads may read the host's tensors between steps.
    """

    def __init__(
        self,
        attention: TreeAttention,
        settings: Settings,
        state: ServerState,
        tree_layers: int,
        *,
        counts: bool,
        plans_on_device: bool,
        shows_batch: bool = True,
    ) -> None:
        self.shape = LayerShape(
            attention.num_query_heads, attention.num_kv_heads, attention.head_dim
        )
        self.verifies = settings.verify
        self.query_tokens = attention.query_tokens
        self._attention = attention
        self._on_device = plans_on_device
        self._shows_batch = shows_batch
        self._settings = settings
        self._state = state
        self._tree_layers = tree_layers
        self.counts = counts
        self._counting = False
        self._broken: str | None = None
        self._left: set[str] = set()

    def takes(self, layer: Layer) -> bool:
        """Whether a layer goes through tree attention."""
        if self._broken is not None or layer.reason is not None or layer.shape != self.shape:
            return False
        return (layer.kv_dtype or self._attention.dtype) == self._attention.kv_dtype

    def refuses(self, requests: int) -> str | None:
        """The reason why the host's implementation decodes a batch of `requests` requests, or None.

        It must follow from the padded size alone: the host captures one graph for a size, and
        replays it for every batch padded to that size.
        """
        if self._broken is not None:
            return self._broken
        return refused(requests, self._settings, self._attention.max_batch)

    def holds(self, requests: int, query_tokens: int) -> bool:
        """Whether this group's plans hold another group's step of so many requests and tokens."""
        return query_tokens <= self.query_tokens and self.refuses(requests) is None

    def plan(self, page_table: torch.Tensor, seq_lens: torch.Tensor, query_tokens: int = 1) -> None:
        """Plan a step from the host's own tensors `page_table` [B, P] and `seq_lens` [B]."""
        if self._on_device:
            self._attention.plan_on_device(page_table, seq_lens, query_tokens=query_tokens)
            return
        began = time.perf_counter()
        lens = seq_lens.numpy()
        # Do not check that equality is monotone: vLLM keeps both copies of a page computed twice,
        # and a later request may hold either copy. Equal page ids still mean equal tokens before
        # them.
        forest = forest_from_page_tables(
            page_table.numpy(), lens, self._attention.page_size, check=False
        )
        plan = self._attention.plan(forest, query_tokens=query_tokens)
        state = self._state
        state.plans += 1
        state.plan_seconds += time.perf_counter() - began
        if self.counts:
            state.forest, state.rids = forest, [str(row) for row in range(len(lens))]
            state.count_tree(int(lens.sum()), plan.loaded_tokens(lens), self._tree_layers)

    def run(
        self,
        layer: Layer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        output: torch.Tensor,
        query_start: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Compute one layer of the planned step into `output` [T, Hq, D], from `query` [T, Hq, D].

        Without `query_start` [B + 1], T is B.
        """
        k_scale: float | torch.Tensor = 1.0
        v_scale: float | torch.Tensor = 1.0
        if layer.scales is not None:
            q_scale, k_scale, v_scale = layer.scales
            if query.dtype != self._attention.dtype:  # some backends take queries of 8 bits
                query, k_scale = query.to(self._attention.dtype), k_scale * q_scale
            kv_cache = kv_cache.view(self._attention.kv_dtype)
        k_cache, v_cache = kv_views(kv_cache, layer.shape.head_dim)
        # Padding requests have length 0 or no rows. For length 0 the kernels write zeros.
        self._attention.run(
            query,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            query_start=query_start,
            sm_scale=layer.sm_scale,
            logit_cap=layer.logit_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            out=output,
            static_launch=self._on_device,
        )

    def count(self, reason: str | None, common: Any) -> None:
        """Count a decode step of the host, with its reason; the planner counts the other steps.

        Parameters
        ----------
        reason : str, optional
            Why the host's implementation decodes the step.
        common : CommonAttentionMetadata
            Of the batch.
        """
        if not self.counts:
            return
        if self._on_device and not self._counting:
            # Earlier plans were for this group's warm-up and for captures. Dummy batches that the
            # host builds like a step are counted as steps.
            self._counting = True
            counters = self._attention.device_planner.counters
            self._state.attach_device_counters(counters.numpy())
            self._state.device_tree_layers = self._tree_layers
        if reason is not None:
            self._state.count_host(reason, tokens_of(common))
        elif self._on_device and not self._shows_batch:
            self._state.batch = HIDDEN_BATCH
        elif self._on_device:
            requests = common.num_reqs
            self._state.batch = Batch(
                common.block_table_tensor[:requests], common.seq_lens[:requests],
                self._attention.page_size,
            )  # fmt: skip

    def count_verified(self, common: Any) -> None:
        """Count the query tokens of a verification, without padding."""
        if self.counts:
            self._state.verified_tokens += int(common.query_start_loc_cpu[common.num_reqs])

    def verify(self, out: torch.Tensor, host: Callable[[], torch.Tensor]) -> None:
        """Compare `out` with the host's result; keep the host's result if they differ.

        Only eager steps are compared: the CPU can read nothing back during a capture.
        """
        if _capturing(out):
            return
        ours = out.clone()
        host()
        largest = max(SMALLEST, float(out.abs().max()))
        eight_bits = self._attention.kv_dtype.itemsize == 1
        tolerance = TOLERANCE[out.dtype] * (EIGHT_BITS if eight_bits else 1)
        difference = float((ours.float() - out.float()).abs().max())
        if difference <= tolerance * largest:
            out.copy_(ours)
            return
        logger.error(
            "deft: tree attention does not agree with the host's own: they differ by %g; the "
            "host's decodes from here", difference,
        )  # fmt: skip
        self._broken = "kernel failed"

    def leave(self, reason: str) -> None:
        """Note that a layer of planned steps runs in the host's kernel; log each reason once."""
        if reason not in self._left:
            self._left.add(reason)
            logger.warning("deft: layers with %s decode through the host's own kernel", reason)

    def give_up(self, error: Exception) -> None:
        """Leave every decode step from now on to the host's implementation."""
        self._broken = "kernel failed"
        logger.error("deft: a kernel failed, the host's own decode from here: %r", error)
        logger.debug("deft: a kernel failed", exc_info=True)

    def leave_unplanned(self, error: Exception, seq_lens: torch.Tensor) -> None:
        """Leave a step to the host's implementation, because its planning failed.

        The host planner plans the next batch again. The device planner fails at a launch, whatever
        the batch is, so it is not tried again.
        """
        then = "the host's kernel decodes such batches"
        if self._on_device:
            self._broken = "planning failed"
            then = "the host's own decode from here"
        elif self.counts:
            self._state.count_host("planning failed", int(seq_lens.sum()))
        if (reason := f"planning failed {type(error).__name__}") not in self._left:
            self._left.add(reason)
            logger.error("deft: planning failed, %s: %r", then, error)
            logger.debug("deft: planning failed", exc_info=True)


def tokens_of(common: Any) -> int:
    """Tokens of context of a batch; 0 if the CPU does not know them."""
    lens = common.seq_lens_cpu_upper_bound
    if lens is None and common.seq_lens.device.type == "cpu":
        lens = common.seq_lens
    return 0 if lens is None else int(lens[: common.num_reqs].sum())


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

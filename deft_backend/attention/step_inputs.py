"""The inputs of one run: count the requests, and fill in what the caller left out."""

from __future__ import annotations

import torch

from deft_backend.attention.current_plan import PlannedBatch
from deft_backend.attention.step_checks import AttentionError
from deft_backend.kernels import EXPONENT_BITS
from deft_backend.shapes.attention_shape import AttentionShape


class StepInputs:
    """Completes what the caller of :meth:`TreeAttention.run` passes.

    Its own tensors keep their addresses, so that CUDA graphs can hold them.

    Parameters
    ----------
    shape : AttentionShape
    max_requests : int
        Most requests of a batch.

    Attributes
    ----------
    shape : AttentionShape
    exponent_bits : int
        Of an element of a cache of 8 bits; 0 for other caches.
    unit_scale : [1] float32
        The scale 1 on the device.
    """

    def __init__(self, shape: AttentionShape, max_requests: int) -> None:
        self.shape = shape
        self._own_rows = torch.arange(max_requests, dtype=torch.int32, device=shape.device)
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=shape.device)
        self.exponent_bits = EXPONENT_BITS.get(shape.kv_dtype, 0)

    def count(
        self,
        q: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor | None,
        planned: PlannedBatch,
        static_launch: bool,
    ) -> tuple[int, int]:
        """Requests of the run, and rows of `q`.

        Raises
        ------
        AttentionError
            If there is no plan for the launches, or the plan covers more requests.
        """
        query_tokens = planned.blocks.query_tokens
        given = len(seq_lens) if query_start is not None else len(q) // query_tokens
        requests = _requests_to_run(planned, given, static_launch)
        return requests, len(q) if query_start is not None else requests * query_tokens

    def new_output(
        self,
        q: torch.Tensor,
        requests: int,
        query_start: torch.Tensor | None,
        planned: PlannedBatch,
        static_launch: bool,
    ) -> torch.Tensor:
        """A tensor for the output: zeros where the kernels may leave a row as it is."""
        # A CUDA graph may be replayed for fewer requests than it was captured for. Only device
        # plans cover padding requests. With other plans, their outputs must not be stale memory.
        covered = query_start is None and (
            not static_launch or (planned.on_device and requests <= planned.requests)
        )
        return torch.empty_like(q) if covered else torch.zeros_like(q)

    def first_rows(self, page_table: torch.Tensor, requests: int) -> torch.Tensor:
        """[requests] int32: row ``r`` of the page table for request ``r``."""
        if requests > min(len(page_table), len(self._own_rows)):
            raise AttentionError(
                f"{requests} requests, a page table of {len(page_table)} rows and max_batch "
                f"{len(self._own_rows)}; expected a row each, or table_rows, and a larger max_batch"
            )
        return self._own_rows[:requests]

    def paged(self, cache: torch.Tensor) -> torch.Tensor:
        """[pages, page_size, Hkv, D] view of a cache."""
        return cache.unsqueeze(1) if cache.dim() == 3 and self.shape.page_size == 1 else cache

    def both_or_none(
        self, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor
    ) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """Two tensors on the device, or two plain numbers, as the kernels need them."""
        if isinstance(k_scale, torch.Tensor) == isinstance(v_scale, torch.Tensor):
            return k_scale, v_scale
        k_scale, v_scale = (
            scale if isinstance(scale, torch.Tensor)
            else self.unit_scale if scale == 1.0 else self.unit_scale * scale
            for scale in (k_scale, v_scale)
        )  # fmt: skip
        return k_scale, v_scale


def _requests_to_run(planned: PlannedBatch, requests: int, static_launch: bool) -> int:
    """The number of requests for a run: that of the planned batch, or a larger `requests`.

    Raises
    ------
    AttentionError
        If there is no plan for the launches, or the plan covers more requests than `requests`.
    """
    if static_launch:
        expected = requests
    elif planned.forest is not None:
        expected = planned.forest.batch_size // planned.blocks.blocks
    else:
        raise AttentionError("nothing is planned; call plan(forest) first")
    if expected < planned.requests:
        raise AttentionError(
            f"q is for {expected} requests; the plan is for {planned.requests} requests: plan the "
            "batch that is run"
        )
    return expected

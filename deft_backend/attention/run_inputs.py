"""What a run needs: the workspace, the number of requests, and what the caller left out."""

import torch

from deft_backend.attention.current_plan import PlannedBatch
from deft_backend.attention.step_checks import AttentionError
from deft_backend.kernels import Partials, Step
from deft_backend.shapes import AttentionShape


def allocate_workspace(
    entries: int, num_query_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Partials:
    """Room for the partial results of `entries` query tokens of items, for operands of `dtype`."""
    # After division by the largest element, float16 keeps 11 bits of mantissa for any range of
    # values.
    held = torch.float32 if dtype == torch.float32 else torch.float16
    out = torch.empty((entries, num_query_heads, head_dim), dtype=held, device=device)
    lse, scale = torch.empty((2, entries, num_query_heads), dtype=torch.float32, device=device)
    return Partials(out, lse, scale)


class RunInputs:
    """Completes what the caller of :meth:`TreeAttention.run` passes.

    Its own tensors keep their addresses, so that CUDA graphs can hold them. `unit_scale` [1]
    float32 is the scale 1 on the device.
    """

    def __init__(self, shape: AttentionShape, max_requests: int) -> None:
        self.shape = shape
        self._own_rows = torch.arange(max_requests, dtype=torch.int32, device=shape.device)
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=shape.device)

    def new_output(
        self,
        q: torch.Tensor,
        requests: int,
        query_start: torch.Tensor | None,
        planned: PlannedBatch,
        static_launch: bool,
    ) -> torch.Tensor:
        """A tensor for the output: zeros where the kernels may leave a row as it is."""
        # A CUDA graph may be replayed for fewer requests than it was captured for. Plans from page
        # tables cover padding requests. With other plans, their outputs must not be stale memory.
        covered = query_start is None and requests <= planned.requests
        covered = covered and (planned.from_rows or not static_launch)
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

    def put_scales_together(self, step: Step) -> None:
        """Two tensors on the device, or two plain numbers, as the kernels need them."""
        k_scale, v_scale = step.k_scale, step.v_scale
        if isinstance(k_scale, torch.Tensor) != isinstance(v_scale, torch.Tensor):
            step.k_scale = self._on_device(k_scale)
            step.v_scale = self._on_device(v_scale)

    def _on_device(self, scale: float | torch.Tensor) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale
        return self.unit_scale if scale == 1.0 else self.unit_scale * scale


def requests_to_run(planned: PlannedBatch, given: int, static_launch: bool) -> int:
    """The number of requests for a run: that of the planned batch, or a larger one that is given.

    Raises AttentionError if there is no plan for the launches, or the plan covers more requests
    than `given`.
    """
    if static_launch:
        expected = given
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

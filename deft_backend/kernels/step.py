"""One record for a step: its tensors, from the host's call to the launches of both stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deft_backend.kernels.arguments import Partials, Scaling, Strides, Tensors

LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class Step:
    """The tensors of a planned batch's attention in one layer, on the attention's device."""

    # [T, Hq, D]: query tokens and where the attention goes; the last dimension is contiguous.
    q: torch.Tensor
    # [pages, page_size, Hkv, D]: the KV cache; the last dimension is contiguous.
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    page_table: torch.Tensor  # [rows, P] int: page ids
    seq_lens: torch.Tensor  # [B] int: current tokens of each request
    # [B] or: row of the page table of each request, or of each KV range of the plan.
    table_rows: torch.Tensor
    # [B + 1] int32: index in `q` of each request's first query token; None: all requests have
    # equally many.
    query_start: torch.Tensor | None
    # [B, query tokens, words] int64: bits of a token tree; None: the query tokens are a chain.
    ancestors: torch.Tensor | None
    sinks: torch.Tensor | None  # [Hq] float: the sink of each query head
    # What a stored key and a stored value are multiplied with. 1.0 unless the cache has 8 bits.
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    # Scale of the scores, and their soft cap; a cap of 0 is none.
    sm_scale: float
    logit_cap: float

    @property
    def device_scales(self) -> bool:
        """Whether the device holds the scales of a cache of 8 bits."""
        return isinstance(self.k_scale, torch.Tensor)

    def tensors(self, partial: Partials) -> Tensors:
        """What the kernels take.

        A launch passes an address for each field. For a tensor that the step lacks, and that the
        kernels therefore do not read, it passes the address of `partial.lse`.
        """
        lse = partial.lse
        on_device = self.device_scales
        return Tensors(
            self.q, self.k_cache, self.v_cache, self.out, partial,
            self.page_table, self.table_rows, self.seq_lens,
            lse if self.query_start is None else self.query_start,
            lse if self.ancestors is None else self.ancestors,
            lse if self.sinks is None else self.sinks,
            self.k_scale if on_device else lse,
            self.v_scale if on_device else lse,
        )  # fmt: skip

    def strides(self) -> Strides:
        """Strides in elements, of the tensors whose strides can differ between batches."""
        q_batch, q_head, _ = self.q.stride()
        out_batch, out_head, _ = self.out.stride()
        batch, token = (0, 0) if self.ancestors is None else self.ancestors.stride()[:2]
        return Strides(
            q_batch, q_head, out_batch, out_head, self.page_table.stride(0), batch, token
        )

    def scaling(self) -> Scaling:
        """The scales that the CPU knows; scores are in base 2 unless a soft cap needs them as they
        are."""
        scale = float(self.sm_scale) if self.logit_cap > 0.0 else float(self.sm_scale) * LOG2_E
        cap = float(self.logit_cap) or 1.0
        if self.device_scales:
            return Scaling(scale, cap, 1.0)
        return Scaling(scale * float(self.k_scale), cap, float(self.v_scale))

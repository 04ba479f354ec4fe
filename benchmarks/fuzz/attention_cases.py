"""Fuzz attention: every planner and policy against attention in float32 (on the CPU, float64)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.fuzz.forests import Limits, RandomBatch, draw_batch
from benchmarks.fuzz.outcome import Failure
from benchmarks.fuzz.settings import DEVICE, TOLERANCE, AttentionSetting
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.policy_names import AUTO

MOST_REQUESTS = 64
"""The device planner's kernels are compiled for 64 requests, and for more only if need be."""

_POOL_TOKENS = 32768
_POOL_ELEMENTS = 1 << 26
_GATHERED = 1 << 24
"""Most elements of keys that the reference holds at a time."""


class AttentionFuzzer:
    """Runs batches of one attention; only :meth:`run` waits for the device, once for all seeds.

    Before each batch all KV that no request of it may read is NaN or infinite: unused pages, and
    the rest of each last page. Outputs and workspace are NaN.

    Parameters
    ----------
    setting : AttentionSetting
    device : torch.device
    large : bool
        Whether batches are as large as a GPU runs fast.
    """

    def __init__(self, setting: AttentionSetting, device: torch.device, *, large: bool) -> None:
        self.setting = setting
        self._device = device
        self._dtype: torch.dtype = getattr(torch, setting.dtype)
        self._integers: torch.dtype = getattr(torch, setting.integers)
        self._exact = torch.float32 if device.type == "cuda" else torch.float64
        heads, dim, size = setting.kv_heads, setting.head_dim, setting.page_size
        tokens = min(_POOL_TOKENS if large else 4096, _POOL_ELEMENTS // (heads * dim))
        pages = 1 << (tokens // size).bit_length() - 1
        self.limits = Limits(MOST_REQUESTS if large else 9, 1500 if large else 120, pages)
        random = torch.Generator(device).manual_seed(heads * dim + size)
        shape = (2, pages * size, heads, dim)
        self._clean = torch.randn(shape, generator=random, device=device).to(self._dtype)
        self._cache = torch.empty_like(self._clean)
        self._attention: dict[str, TreeAttention] = {}

    def batch(self, seed: int, planner: str) -> RandomBatch:
        """The batch of a seed."""
        random = np.random.default_rng([seed, 2])
        grown = planner != DEVICE
        return draw_batch(random, self.setting.page_size, self.limits, grown=grown, twins=True)

    def run(self, seeds: Sequence[int], planner: str) -> tuple[list[Failure], float]:
        """Failing seeds, and the largest error of the others."""
        errors = torch.stack(
            [self.error(self.batch(seed, planner), seed, planner) for seed in seeds]
        ).tolist()
        limit = TOLERANCE[self.setting.dtype]
        failures = [
            Failure(seed, planner, f"error {error:.3g}; expected at most {limit}")
            for seed, error in zip(seeds, errors, strict=True)
            if not error <= limit
        ]
        return failures, max((error for error in errors if error <= limit), default=0.0)

    def error(self, batch: RandomBatch, seed: int, planner: str) -> torch.Tensor:
        """[] float: the largest error of a query head's output; infinite for NaN."""
        setting, device = self.setting, self._device
        attention = self._attention_of(planner)
        table, contents, rows, lens = (
            torch.from_numpy(array).to(device, self._integers)
            for array in (batch.page_table, batch.contents, batch.rows, batch.seq_lens)
        )
        self._fill(batch, table, contents, rows, lens, seed)
        random = torch.Generator(device).manual_seed(seed)
        shape = (batch.requests, setting.query_heads, setting.head_dim)
        q = torch.randn(shape, generator=random, device=device).to(self._dtype)
        k_cache, v_cache = self._cache.view(
            2, -1, setting.page_size, setting.kv_heads, setting.head_dim
        )
        out = torch.full_like(q, float("nan"))
        static = planner == DEVICE
        if planner == DEVICE:
            attention.plan_on_device(table, lens, table_rows=rows)
        else:
            own = np.ascontiguousarray(batch.page_table[batch.rows])
            forest = forest_from_page_tables(
                own, batch.planned_lens, batch.page_size, check=batch.monotone
            )
            attention.plan(forest)
            static = seed % 3 == 0
        attention.poison_workspace()
        attention.run(
            q, k_cache, v_cache, table, lens, table_rows=rows, out=out, static_launch=static,
            logit_cap=setting.soft_cap,
        )  # fmt: skip
        expected = self._reference(batch, q, contents, rows, lens)
        difference = (out.to(self._exact) - expected).norm(dim=-1)
        error = difference / expected.norm(dim=-1).clamp(min=1e-20)
        return torch.nan_to_num(error, nan=math.inf).amax()

    def _attention_of(self, planner: str) -> TreeAttention:
        if planner not in self._attention:
            setting = self.setting
            self._attention[planner] = TreeAttention(
                num_query_heads=setting.query_heads, num_kv_heads=setting.kv_heads,
                head_dim=setting.head_dim, dtype=self._dtype, device=self._device,
                page_size=setting.page_size, max_batch=MOST_REQUESTS,
                policy=AUTO if planner == DEVICE else planner,
            )  # fmt: skip
        return self._attention[planner]

    def _fill(
        self,
        batch: RandomBatch,
        table: torch.Tensor,
        contents: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
        seed: int,
    ) -> None:
        """Put each token that a request may read in its place, and poison everything else."""
        self._cache.fill_((math.nan, math.inf, -math.inf)[seed % 3])
        longest = int(batch.seq_lens.max(initial=0))
        size = self.setting.page_size
        position = torch.arange(longest, device=self._device)
        used = position < lens[:, None]
        place = (position % size).expand_as(used)
        page = position // size
        to = (table[rows.long()][:, page].long() * size + place)[used]
        source = (contents[rows.long()][:, page].long() * size + place)[used]
        self._cache[:, to] = self._clean[:, source]

    def _reference(
        self,
        batch: RandomBatch,
        q: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        lens: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of each request over its own tokens: [B, Hq, D], zeros without tokens."""
        setting = self.setting
        heads, dim, size = setting.kv_heads, setting.head_dim, setting.page_size
        longest = int(batch.seq_lens.max(initial=0))
        position = torch.arange(longest, device=self._device)
        at_once = max(1, _GATHERED // max(1, longest * heads * dim))
        found = []
        for begin in range(0, batch.requests, at_once):
            some = slice(begin, begin + at_once)
            used = position < lens[some, None]
            page = table[rows[some].long()][:, position // size].long()
            slot = torch.where(used, page * size + position % size, 0)
            k, v = self._clean[:, slot].to(self._exact)
            grouped = q[some].to(self._exact).view(-1, heads, setting.query_heads // heads, dim)
            scores = torch.einsum("bhgd,bthd->bhgt", grouped, k) / math.sqrt(dim)
            if setting.soft_cap:
                scores = setting.soft_cap * torch.tanh(scores / setting.soft_cap)
            scores = scores.masked_fill(~used[:, None, None, :], -math.inf)
            weights = torch.nan_to_num(scores.softmax(-1))  # without tokens: 0 / 0
            found.append(torch.einsum("bhgt,bthd->bhgd", weights, v).flatten(1, 2))
        return torch.cat(found)

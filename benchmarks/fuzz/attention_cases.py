"""Fuzz attention: every planner and policy against attention in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.fuzz.attention_settings import DEVICE, LAYOUT_AXES, TOLERANCE, AttentionSetting
from benchmarks.fuzz.forests import Limits, RandomBatch, draw_batch
from benchmarks.fuzz.poisoned_cache import PoisonedCache
from benchmarks.fuzz.random_steps import RandomStep, draw_step
from benchmarks.fuzz.walk_plan import fault_of
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention
from deft_backend.settings.policy_names import AUTO

MOST_QUERIES = 64
"""The device planner's kernels are compiled for 64 queries, and for more only if need be."""

LEAST_SUM = 1e-32
"""The smallest normal number of float32, by the tolerance. A large sink makes smaller outputs."""

_POOL_TOKENS = 32768
_POOL_ELEMENTS = 1 << 26


class Failure(NamedTuple):
    """A seed that fails, and why, in words."""

    seed: int
    planner: str  # ``device``, or the policy of the reference
    why: str


class AttentionFuzzer:
    """Runs batches of one attention; only :meth:`run` waits for the device, once for all seeds.

    Before each batch all KV that no request of it may read is poison: unused pages, and the rest
    of each last page. Outputs and workspace are NaN.

    - `large`: whether batches are as large as a GPU runs fast.
    """

    def __init__(self, setting: AttentionSetting, device: torch.device, *, large: bool) -> None:
        self.setting = setting
        self._device = device
        self._dtype: torch.dtype = getattr(torch, setting.dtype)
        self._integers: torch.dtype = getattr(torch, setting.integers)
        heads, dim, size = setting.kv_heads, setting.head_dim, setting.page_size
        tokens = min(_POOL_TOKENS if large else 4096, _POOL_ELEMENTS // (heads * dim))
        pages = 1 << (tokens // size).bit_length() - 1
        blocks = setting.blocks
        self._drafted = blocks.private_tokens
        # In the interpreter, each item of each query takes its time.
        requests = MOST_QUERIES // blocks.blocks if large else min(9, max(3, 9 // blocks.blocks))
        self.limits = Limits(requests, (1500 if large else 120) + self._drafted, pages)
        self._cache = PoisonedCache(setting, pages, device)
        self._attention: dict[str, TreeAttention] = {}
        self._faults: dict[int, str] = {}  # mistakes of plans, by seed

    def draw(self, seed: int, planner: str) -> tuple[RandomBatch, RandomStep]:
        """The batch of a seed, and its step."""
        random = np.random.default_rng([seed, 2])
        batch = draw_batch(
            random,
            self.setting.page_size,
            self.limits,
            grown=planner != DEVICE,
            twins=True,
            drafted=self._drafted if seed % 2 else 0,
        )
        return batch, draw_step(np.random.default_rng([seed, 3]), self.setting, batch)

    def run(self, seeds: Sequence[int], planner: str) -> tuple[list[Failure], float]:
        """Run a case for each seed; returns failures, and the largest error of the others."""
        drawn = [self.draw(seed, planner) for seed in seeds]
        self._faults = {}
        errors = torch.stack(
            [self.error(*one, seed, planner) for seed, one in zip(seeds, drawn, strict=True)]
        ).tolist()
        limit = TOLERANCE[self.setting.dtype]
        failures = [
            Failure(seed, planner, f"error {error:.3g}; expected at most {limit}")
            for seed, error in zip(seeds, errors, strict=True)
            if not error <= limit
        ]
        failures += [Failure(seed, planner, fault) for seed, fault in self._faults.items()]
        passed = [error for error in errors if error <= limit]
        return failures, max(passed, default=0.0)

    def error(self, batch: RandomBatch, step: RandomStep, seed: int, planner: str) -> torch.Tensor:
        """[] float: the largest error of a query head's output; infinite for NaN, and for a written
        row that belongs to no request."""
        setting = self.setting
        table, contents, rows, lens = (
            torch.from_numpy(array).to(self._device, self._integers)
            for array in (batch.page_table, batch.contents, batch.rows, step.seq_lens)
        )
        own, contents = table[rows.long()], contents[rows.long()]
        self._cache.fill(own, contents, lens, seed)
        if setting.own_rows:
            table = own
        q = self._queries(step, seed)
        out = torch.full(q.shape, math.nan, dtype=q.dtype, device=self._device)
        listed = None if setting.own_rows else rows
        attention = self._attention_of(planner)
        static = planner == DEVICE
        if planner == DEVICE:
            attention.plan_batch(
                table, lens, table_rows=listed, query_tokens=step.query_tokens, on_device=True
            )
        else:
            forest = forest_from_page_tables(
                np.ascontiguousarray(batch.page_table[batch.rows]),
                batch.planned_lens,
                batch.page_size,
                check=batch.monotone,
            )
            plan = attention.plan(forest, query_tokens=step.query_tokens)
            where = (batch.contents, batch.rows, step.seq_lens, batch.page_size)
            private = step.query_tokens if step.query_tokens > 1 else 0
            if fault := fault_of(plan, *where, attention.target, private):
                self._faults[seed] = fault
            static = seed % 3 == 0
        attention.poison_workspace()
        k_cache, v_cache = self._cache.filled
        attention.run(
            q,
            k_cache,
            v_cache,
            table,
            lens,
            table_rows=listed,
            out=out,
            static_launch=static,
            **self._options(step, seed),
        )
        return _largest_error(out, self._expected(step, q, contents))

    def _queries(self, step: RandomStep, seed: int) -> torch.Tensor:
        """[rows, Hq, D]: as a tensor of their own, or as a part of queries, keys and values."""
        setting = self.setting
        random = torch.Generator(self._device).manual_seed(seed)
        shape = (step.rows, setting.query_heads, setting.head_dim)
        q = torch.randn(shape, generator=random, device=self._device).to(self._dtype)
        if setting.layout == LAYOUT_AXES:
            return q
        others = q.new_full((step.rows, 2 * setting.kv_heads, setting.head_dim), math.nan)
        return torch.cat([q, others], dim=1)[:, : setting.query_heads]

    def _options(self, step: RandomStep, seed: int) -> dict[str, Any]:
        """What a run gets besides tensors that every run has."""
        setting, device = self.setting, self._device
        options: dict[str, Any] = {
            "logit_cap": setting.soft_cap,
            "k_scale": step.k_scale,
            "v_scale": step.v_scale,
        }
        if setting.tensor_scales:  # one of both is enough for the kernels to read tensors
            for name in (("k_scale", "v_scale"), ("k_scale",), ("v_scale",))[seed % 3]:
                options[name] = torch.full((), options[name], dtype=torch.float32, device=device)
        options["sinks"] = self._sinks(step)
        for name in ("query_start", "ancestors"):
            array = getattr(step, name)
            options[name] = None if array is None else torch.from_numpy(array).to(device)
        return options

    def _sinks(self, step: RandomStep) -> torch.Tensor | None:
        if step.sinks is None:
            return None
        dtype: torch.dtype = getattr(torch, self.setting.sinks)
        return torch.from_numpy(step.sinks).to(self._device, dtype)

    def _expected(self, step: RandomStep, q: torch.Tensor, contents: torch.Tensor) -> torch.Tensor:
        """[tokens of requests, Hq, D] float64.

        What decides shapes stays on the CPU, which then waits for nothing.
        """
        k_cache, v_cache = self._cache.clean
        starts, bits = (
            None if array is None else torch.from_numpy(array)
            for array in (step.query_start, step.ancestors)
        )
        used = len(q) if starts is None else int(starts[-1])
        return reference_attention(
            q[:used],
            k_cache,
            v_cache,
            contents,
            torch.from_numpy(step.seq_lens),
            logit_cap=self.setting.soft_cap,
            k_scale=step.k_scale,
            v_scale=step.v_scale,
            sinks=self._sinks(step),
            query_start=starts,
            ancestors=bits,
        )

    def _attention_of(self, planner: str) -> TreeAttention:
        if planner not in self._attention:
            setting = self.setting
            self._attention[planner] = TreeAttention(
                num_query_heads=setting.query_heads,
                num_kv_heads=setting.kv_heads,
                head_dim=setting.head_dim,
                dtype=self._dtype,
                device=self._device,
                kv_dtype=getattr(torch, setting.kv_dtype) if setting.eight_bits else None,
                page_size=setting.page_size,
                max_batch=self.limits.requests,
                query_tokens=setting.query_tokens,
                policy=AUTO if planner == DEVICE else planner,
            )
        return self._attention[planner]


def _largest_error(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[] float64: of the rows of `expected`; `out` has NaN in the rows behind them."""
    difference = (out[: len(expected)].double() - expected).norm(dim=-1)
    # Smaller numbers have fewer bits in the output's dtype, or in the float32 of the kernels' sums.
    least = max(torch.finfo(out.dtype).smallest_normal, LEAST_SUM) * math.sqrt(out.shape[-1])
    error = (difference / expected.norm(dim=-1).clamp(min=least)).flatten()
    written = torch.where(out[len(expected) :].isnan().all(), 0.0, math.inf)
    return torch.nan_to_num(torch.cat([error, written.double()[None]]), nan=math.inf).amax()

"""Fuzz plans alone: the reference and the device planner plan the same batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.fuzz.forests import Limits, RandomBatch, draw_batch
from benchmarks.fuzz.outcome import Failure
from benchmarks.fuzz.plan_settings import PlanSetting
from benchmarks.fuzz.ties import is_tie
from benchmarks.fuzz.walk_plan import fault_of
from deft_backend.forest import PrefixForest, forest_from_page_tables, forest_of_blocks
from deft_backend.planner import DevicePlan, Plan, PlanCapacity, plan_forest
from deft_backend.planner.on_device import DevicePlanner
from deft_backend.policies import get_policy
from deft_backend.settings.policy_names import AUTO, POLICY_NAMES


@dataclass
class PlanCounts:
    """What a chunk of plans came to.

    - `plans`: plans that were walked.
    - `kinds`: plans whose requests have several query tokens, and several query blocks.
    - `compared`: batches that both planners planned.
    - `same`: of these, those with the same items.
    - `ties`: the seeds of those with other items that cost the same (:mod:`benchmarks.fuzz.ties`).
      All others are failures.
    """

    plans: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    same: int = 0
    ties: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class PlanFuzzer:
    """Plans batches of one setting on the device, all of a chunk before the CPU reads any.

    - `large`: whether batches are as large as a GPU plans fast.
    """

    def __init__(self, setting: PlanSetting, device: torch.device, *, large: bool) -> None:
        self.setting = setting
        self.target = setting.target()
        self._blocks = setting.blocks
        queries = 256
        requests = min(192 if large else 12, queries // self._blocks.blocks)
        tokens = (60_000 if large else 1500) + self._blocks.private_tokens
        self.limits = Limits(requests, tokens, 1 << 22 if large else 1 << 18)
        self._device = device
        capacity = PlanCapacity.for_batch(queries, max(self.target.tile_programs))
        self.capacity = capacity
        on_gpu = device.type == "cuda"
        overlapped = on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)
        self._plan = DevicePlan(capacity, device)
        # The interpreted planner prices four chunk lengths of 64. So its decisions are the host's
        # only if each range is one block.
        self._decides_alike = on_gpu or setting.block_tokens >= self.limits.tokens
        self._planner = DevicePlanner(
            self.target,
            get_policy(AUTO),
            self._plan,
            device,
            setting.page_size,
            overlapped=overlapped,
        )  # fmt: skip

    def batch(self, seed: int) -> RandomBatch:
        """The batch of a seed."""
        random = np.random.default_rng([seed, 1])
        drafted = self._blocks.private_tokens if seed % 2 else 0
        size = self.setting.page_size
        return draw_batch(random, size, self.limits, twins=True, drafted=drafted)

    def run(self, seeds: Sequence[int]) -> PlanCounts:
        """Plan the batches of some seeds with both planners, walk the plans and compare them."""
        batches = [self.batch(seed) for seed in seeds]
        planned = self._on_device(batches)
        counts = PlanCounts()
        for seed, batch, found in zip(seeds, batches, planned, strict=True):
            counts.plans += 1
            why = self._fault(batch, found)
            if why:
                counts.failures.append(Failure(seed, "device", why))
            self._compare(seed, batch, found, counts)
        if self._blocks.query_tokens > 1:
            counts.kinds["several query tokens"] = counts.plans
        if self._blocks.blocks > 1:
            counts.kinds["several query blocks"] = counts.plans
        return counts

    def _compare(self, seed: int, batch: RandomBatch, found: Plan, counts: PlanCounts) -> None:
        forest = self._forest(batch)
        host, _ = plan_forest(forest, get_policy(AUTO), self.target, self.capacity)
        counts.plans += 1
        why = self._fault(batch, host)
        if why:
            counts.failures.append(Failure(seed, AUTO, why))
        # If requests share pages of query tokens, each planner keeps another order of them. No host
        # makes such batches.
        drafted = batch.drafted == self._blocks.private_tokens
        if self._decides_alike and batch.monotone and drafted:
            counts.compared += 1
            if _same(found, host):
                counts.same += 1
            elif is_tie(forest, self.target, self.capacity, partial(_same, found)):
                counts.ties.append(seed)
            else:
                counts.failures.append(Failure(seed, "device", _difference(found, host)))
        # The other policies take turns; no device planner follows them.
        name = POLICY_NAMES[seed % len(POLICY_NAMES)]
        if name != AUTO:
            other, _ = plan_forest(forest, get_policy(name), self.target, self.capacity)
            counts.plans += 1
            if why := self._fault(batch, other):
                counts.failures.append(Failure(seed, name, why))

    def _forest(self, batch: RandomBatch) -> PrefixForest:
        tables = np.ascontiguousarray(batch.page_table[batch.rows])
        forest = forest_from_page_tables(
            tables, batch.seq_lens, batch.page_size, check=batch.monotone
        )
        return forest_of_blocks(forest, self._blocks.blocks, self._blocks.private_tokens)

    def _fault(self, batch: RandomBatch, plan: Plan) -> str:
        tables = (batch.contents, batch.rows, batch.seq_lens, batch.page_size)
        return fault_of(plan, *tables, self.target, self._blocks.private_tokens)

    def _on_device(self, batches: Sequence[RandomBatch]) -> Iterator[Plan]:
        buffer = self._plan._buffer
        kept = torch.empty((len(batches), len(buffer)), dtype=buffer.dtype, device=self._device)
        for at, batch in enumerate(batches):
            buffer.fill_(0x2BABABAB)  # any earlier content
            table, rows, lens = (
                torch.from_numpy(array).to(self._device)
                for array in (batch.page_table, batch.rows, batch.seq_lens)
            )
            self._planner.plan(table, rows, lens, private_tokens=self._blocks.private_tokens)
            kept[at] = buffer
        on_cpu = kept.cpu()
        return (_read(self._plan._views_of(row)) for row in on_cpu)


def _read(views: dict[str, torch.Tensor]) -> Plan:
    """The plan in a copy of the device's arrays, cut to its counts."""
    arrays = {name: view.numpy() for name, view in views.items()}
    tiles = arrays["tile_ptr"]
    items, reduced = int(tiles[-1]), int(arrays["num_reduce"][0])
    items = min(max(items, 0), len(arrays["item_query_ptr"]) - 1)
    reduced = min(max(reduced, 0), len(arrays["reduce_query"]))
    entries = min(max(int(arrays["item_query_ptr"][items]), 0), len(arrays["entry_query"]))
    counts: dict[str, Any] = {
        "tile_ptr": len(tiles), "item_segment_ptr": items + 1, "item_query_ptr": items + 1,
        "segment_request": items, "segment_start": items, "segment_end": items,
        "segment_span": items, "entry_query": entries, "entry_slot": entries,
        "reduce_query": reduced, "reduce_ptr": reduced + 1,
    }  # fmt: skip
    return Plan(**{name: arrays[name][:count] for name, count in counts.items()})


def _items(plan: Plan) -> npt.NDArray[np.int64]:
    """Queries, start and end of every item, sorted; any request may hold the range."""
    items = np.stack(
        (np.diff(plan.item_query_ptr), plan.segment_start[: plan.num_items],
         plan.segment_end[: plan.num_items])
    ).astype(np.int64)  # fmt: skip
    return items[:, np.lexsort(items)]


def _same(one: Plan, other: Plan) -> bool:
    return np.array_equal(_items(one), _items(other))


def _difference(found: Plan, host: Plan) -> str:
    return (
        f"no tie: the device's plan has {found.num_items} items and {found.num_partials} results "
        f"to merge, the host's {host.num_items} and {host.num_partials}"
    )

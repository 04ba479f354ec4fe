"""Compile everything before the first request, so that no request waits for a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch

from deft_backend.attention import LatentAttention, TreeAttention
from deft_backend.attention.latent_check import failed_latent_check
from deft_backend.attention.self_check import HostTensors
from deft_backend.compile.shared_cache import SharedCache
from deft_backend.compile.variants import Compiled, Variant, compile_all, recorded
from deft_backend.forest import PrefixForest, build_forest
from deft_backend.forest.token_tree import words_of
from deft_backend.planner import Plan, plan_grouping
from deft_backend.planner.on_device import SIZES
from deft_backend.policies import GroupingBuilder, Segment

logger = logging.getLogger("deft_backend")


class Drafts(NamedTuple):
    """What a server verifies, as far as kernels are compiled for it."""

    query_tokens: int  # query tokens of a request
    ragged: bool = False  # whether requests have different numbers of them, up to this one
    trees: bool = False  # whether they form trees, not chains
    always: bool = False  # whether every step verifies drafts; if not, others are plain decode


class LayerKind(NamedTuple):
    """What differs between a server's layers, as far as kernels are compiled for it."""

    soft_cap: bool = False  # whether the scores have a soft cap
    sinks: torch.dtype | None = None  # of the layer's sinks; None for a layer without sinks


@dataclass(frozen=True)
class WarmUpPlan:
    """A plan of the reference, and the requests of the batch that it serves."""

    plan: Plan
    requests: int


@dataclass(frozen=True)
class StepTensors(HostTensors):
    """A host's tensors with what its steps do, as far as kernels are compiled for them."""

    drafts: Drafts | None = None  # what the server verifies; None if it does not speculate
    layers: Sequence[LayerKind] = (LayerKind(),)  # each kind of those through tree attention


def warm_up_attention(
    attention: TreeAttention, tensors: StepTensors, *, on_device: bool, smallest: int = 1,
    shared: SharedCache | None = None,
) -> Compiled | None:  # fmt: skip
    """Compile the kernels of every launch that a step may need, then run each of them once.

    A GPU's kernels are compiled side by side; the log says how many and how long it took. On the
    CPU kernels are interpreted: one small batch shows that they run.

    - `on_device`: whether the device planner makes the plans.
    - `smallest`: requests of the smallest batch that tree attention decodes.
    - `shared`: the cache that other ranks fill at the same time, in use.

    Returns None on the CPU.
    """
    device = attention.device
    done = None
    if device.type == "cuda":
        variants = step_variants(attention, tensors, on_device=on_device, smallest=smallest)
        done = compile_for_server(variants, device, shared)
    for step in _steps(attention, tensors, on_device=on_device, smallest=smallest):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return done


def compile_for_server(
    variants: Sequence[Variant], device: torch.device, shared: SharedCache | None
) -> Compiled:
    """Compile kernels side by side for a GPU and load them; the log says how long it took."""
    done = compile_all(
        variants, prepare=lambda: torch.cuda.set_device(device), load=True, shared=shared
    )
    logger.info("deft: %s", done)
    return done


def step_variants(
    attention: TreeAttention, tensors: StepTensors, *, on_device: bool, smallest: int = 1
) -> list[Variant]:
    """The kernels of every launch of :func:`warm_up_attention`; nothing is compiled or run."""
    with recorded() as variants:
        for step in _steps(attention, tensors, on_device=on_device, smallest=smallest):
            step()
    return list(variants)


def latent_variants(
    attention: LatentAttention, integers: tuple[torch.dtype, torch.dtype], *, on_device: bool
) -> list[Variant]:
    """The kernels of the check of MLA and of a server's steps; nothing is compiled or run.

    - `integers`: of the host's table rows and of its sequence lengths.
    - `on_device`: whether the device planner makes the plans.
    """
    with recorded() as variants:
        failed_latent_check(attention, on_device=on_device)
        table = torch.zeros((1, 1), dtype=torch.int32, device=attention.device)
        for batch in _batches(1, attention.max_batch) if on_device else ():
            rows, lens = (torch.zeros(batch, dtype=t, device=table.device) for t in integers)
            attention.plan_on_device(table, lens, table_rows=rows)
    attention.clear_plan()
    return list(variants)


def _batches(least: int, largest: int, blocks: int = 1) -> list[int]:
    """A batch for each size of the device planner's kernels; the slowest to compile comes first.

    A request has so many `blocks`.
    """
    inner = {size // blocks for size in SIZES if least * blocks <= size < largest * blocks}
    return sorted({least, *inner, largest}, reverse=True)


def _steps(
    attention: TreeAttention, tensors: StepTensors, *, on_device: bool, smallest: int
) -> Iterator[Callable[[], None]]:
    """Yield steps that together launch every kernel variant the server may need.

    Every request reads the same page. With the device planner: a batch of each size that its
    kernels are compiled for. The smallest batch too: it may use no large tiles. With the host
    planner: every set of tile shapes, with and without a reduction, because a launch is compiled
    for whether another follows. Each step runs a layer of each kind.
    """
    device, largest = attention.device, attention.max_batch
    least = min(smallest, largest)
    # Hosts hold the scales of a cache of 8 bits on the device.
    eight_bits = attention.kv_dtype != attention.dtype
    scale: float | torch.Tensor = attention.unit_scale if eight_bits else 1.0

    def attend(query_tokens: int, table: torch.Tensor, lens: torch.Tensor, **step: Any) -> None:
        shape = (query_tokens, attention.num_query_heads, attention.head_dim)
        # Compiled kernels read and write one query token for all: a batch of drafts is large.
        stored = (2, query_tokens if attention.interpreted else 1, *shape[1:])
        q, out = torch.zeros(stored, dtype=attention.dtype, device=device).expand(2, *shape)
        for kind in tensors.layers:
            sinks = None
            if kind.sinks is not None:
                sinks = torch.zeros(attention.num_query_heads, dtype=kind.sinks, device=device)
            attention.run(
                q, tensors.k_cache, tensors.v_cache, table, lens, k_scale=scale, v_scale=scale,
                logit_cap=float(kind.soft_cap), sinks=sinks, out=out, **step,
            )  # fmt: skip

    def held(batch: int, columns: int, tokens: int) -> tuple[torch.Tensor, ...]:
        """Page table, sequence lengths and table rows of requests of `tokens` + 1 tokens."""
        columns = max(tokens + 1, columns)
        table = torch.zeros((1, columns), dtype=tensors.table_dtype, device=device)
        lens = torch.full((batch,), tokens + 1, dtype=tensors.lens_dtype, device=device)
        return table, lens, torch.zeros(batch, dtype=tensors.rows_dtype, device=device)

    def run(batch: int, columns: int, static_launch: bool) -> None:
        table, lens, rows = held(batch, columns, 1)
        if static_launch:
            attention.plan_on_device(table, lens, table_rows=rows)
        attend(batch, table, lens, table_rows=rows, static_launch=static_launch)

    def verify(drafts: Drafts, batch: int, columns: int) -> None:
        tokens = drafts.query_tokens
        table, lens, rows = held(batch, columns, tokens)
        attention.plan_on_device(table, lens, table_rows=rows, query_tokens=tokens)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        bits = torch.zeros((batch, tokens, words_of(tokens)), dtype=torch.int64, device=device)
        attend(
            batch * tokens, table, lens, table_rows=rows,
            query_start=starts if drafts.ragged else None,
            ancestors=bits if drafts.trees else None,
        )  # fmt: skip

    def run_plan(planned: WarmUpPlan, columns: int) -> None:
        attention.use(planned.plan, _forest(planned.requests))
        run(planned.requests, columns, static_launch=False)

    drafts = tensors.drafts if on_device else None
    decodes = drafts is None or not drafts.always
    if on_device and attention.interpreted:
        if decodes:
            yield lambda: run(min(largest, 4), tensors.table_columns[0], True)
        if drafts is not None:
            yield lambda: verify(drafts, min(largest, 4), tensors.table_columns[0])
        return

    if drafts is not None:
        for columns in tensors.table_columns:
            for batch in _batches(least, largest, attention.capacity.max_batch // largest):
                yield lambda batch=batch, columns=columns: verify(drafts, batch, columns)  # type: ignore[misc]
    if on_device:
        for columns in tensors.table_columns if decodes else ():
            for batch in _batches(least, largest):
                yield lambda batch=batch, columns=columns: run(batch, columns, True)  # type: ignore[misc]
        return
    plans = [*plans_of_all_shapes(attention), *plans_of_many(attention)]
    for columns in tensors.table_columns:
        for planned in plans:
            yield lambda planned=planned, columns=columns: run_plan(planned, columns)  # type: ignore[misc]


def _forest(requests: int) -> PrefixForest:
    """Requests of two tokens each that share nothing."""
    return build_forest(range(requests), [0] * (requests - 1), [2] * requests)


def plans_of_all_shapes(attention: TreeAttention) -> Iterator[WarmUpPlan]:
    """A plan for every set of tile shapes, without and with a reduction.

    No plan has a set that no batch of the attention's size and policy reaches.
    """
    target, largest = attention.target, attention.capacity.max_batch
    queries = []  # of a group that runs in each tile shape
    below = 0
    for held, ranges in zip(target.tile_queries, target.tile_segments, strict=True):
        if ranges > 1:
            queries.append(1 if attention.policy.several_segments else 0)
        else:
            queries.append(below + 1 if held > below else 0)
            below = max(below, held)
    reached = [shape for shape, needed in enumerate(queries) if 0 < needed <= largest]
    subsets = (combinations(reached, count) for count in range(1, len(reached) + 1))
    for shapes in chain.from_iterable(subsets):
        batch = sum(queries[shape] for shape in shapes)
        if batch > largest:
            continue
        forest = _forest(batch)
        for repeats in (1, 2):  # two items a query: stage 2 merges them
            builder = GroupingBuilder()
            first = 0
            for shape in shapes:
                rows = list(range(first, first + queries[shape]))
                token = Segment(first, 0, 1, False, 0, len(rows))
                several = target.tile_segments[shape] > 1
                for _ in range(repeats):
                    builder.add(rows, [token, token] if several else [token])
                first += len(rows)
            yield WarmUpPlan(plan_grouping(builder.build(), forest, target), batch)


def plans_of_many(attention: TreeAttention) -> Iterator[WarmUpPlan]:
    """A plan of the smallest batch that stage 2 merges with its configuration for many queries."""
    batch = attention.few_queries + 1
    if batch > attention.capacity.max_batch:
        return
    builder = GroupingBuilder()
    for row in range(batch):
        for _ in range(2):
            builder.add([row], [Segment(row, 0, 1, False, 0, 1)])
    yield WarmUpPlan(plan_grouping(builder.build(), _forest(batch), attention.target), batch)

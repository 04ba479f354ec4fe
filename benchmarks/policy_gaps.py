"""``python -m benchmarks policy-gaps``: how far the policies are from the optimum of their models.

Both papers search greedily. Here are exact answers, where they can be had:

- ``edges``: FastTree's cost equations, by dynamic programming over all edge assignments. A node's
  cost depends on where its context begins, and on how many of its queries leave with it.
- ``makespan``: FlashForge's, over divisions of each kind of node into numbers of chunks.
  ``optimum`` is the least makespan found over a lower bound of all: 1 if it is exact.
- ``measured``: the costs of `auto`, over all edge assignments and chunk lengths. Leaves of equal
  length below one node are interchangeable, so only their number counts. Of large trees, the
  assignments that cut all edges of a depth or none.

Each figure is the policy's cost over the optimum. The policy `oracle` makes the plan of the least
``measured`` cost, so that ``kernel --set policy-gaps`` times it next to the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
import typer

from benchmarks.kernel.sets import read_set
from benchmarks.kernel.tree_workloads import parse_heads
from benchmarks.row_files import RowsError, read_json, write_rows
from deft_backend.attention.run_inputs import target_of
from deft_backend.costs.table_lookup import table_key
from deft_backend.costs.tables import shipped_for
from deft_backend.files.provenance import provenance
from deft_backend.forest import PrefixForest
from deft_backend.kernels import Gpu
from deft_backend.kernels.configurations import kernel_configuration
from deft_backend.policies import FlashForge, Grouping, Policy, Target, get_policy
from deft_backend.policies.chunk_choice import (
    NUM_CHUNKS,
    Machine,
    chunk_of,
    estimate,
    shape_costs,
    shapes_of,
    small_tiles,
    tiles_of,
)
from deft_backend.policies.edges import BoolArray, KVRanges, cut_ranges, grouped_ranges
from deft_backend.policies.fasttree import EdgeCosts, search_edges
from deft_backend.policies.grouping import Int64Array, longest_first
from deft_backend.policies.measured_chunks import Cut, cut_cost
from deft_backend.policies.policy import TwoRulePolicy
from deft_backend.shapes import AttentionShape

POLICIES = ("fasttree", "flashforge", "auto")

ESTIMATED = (*POLICIES, "deft-node", "deft-node-chunk", "flash-decoding")
"""Policies with one KV range an item."""

MOST_ASSIGNMENTS, MOST_DIVISIONS = 20_000, 250_000
"""If a forest has more assignments, ``measured`` cuts all edges of a depth, or none of them. If it
has more divisions, it has no ``makespan``."""

MOST_SCHEDULES = 2000  # divisions that are scheduled, cheapest lower bound first


# FastTree's equations


def edges_cost(forest: PrefixForest, is_cut: BoolArray, costs: EdgeCosts) -> int:
    """FastTree's cost of an edge assignment: padding of each group, and partial results."""
    ranges = grouped_ranges(forest, is_cut)
    groups = zip(ranges.queries.tolist(), (ranges.end - ranges.begin).tolist(), strict=True)
    cut = is_cut & (forest.parent >= 0)
    return sum(costs.padding(q, n) for q, n in groups) + costs.gamma * int(
        forest.num_queries[cut].sum()
    )


def least_edges_cost(forest: PrefixForest, costs: EdgeCosts) -> int:
    """The least cost of all assignments."""
    end, queries = forest.end.tolist(), forest.num_queries.tolist()

    @cache
    def least(node: int, base: int) -> int:
        """Of the groups of a node and all nodes below it, if its context begins at `base`."""
        context = end[node] - base
        if not forest.children[node]:
            return costs.padding(queries[node], context)
        # By the number of queries that stay with the node.
        found = np.full(queries[node] + 1, np.iinfo(np.int64).max // 2)
        found[0] = 0
        for child in forest.children[node]:
            held = queries[child]
            stay = found[:-held] + least(child, end[node]) + costs.gamma * held
            found += least(child, base)
            found[held:] = np.minimum(found[held:], stay)
        padding = (costs.padding(held, context) for held in range(queries[node] + 1))
        return int((found + np.fromiter(padding, np.int64)).min())

    return sum(least(int(root), 0) for root in np.flatnonzero(forest.parent < 0))


# FlashForge's makespan


def makespan_gaps(forest: PrefixForest, target: Target) -> dict[str, float]:
    """`flashforge`'s makespan over the least found, and that one over a lower bound of all.

    Empty for too many divisions. Each tile shape has programs of its own, so makespans add up.
    """
    machine = Machine(target, forest.batch_size)
    ranges, parts = FlashForge().divided_ranges(forest, target)
    tokens, total = ranges.end - ranges.begin, np.zeros(3)
    shape = shapes_of(ranges.queries, machine.tile_queries)
    tiles = tiles_of(ranges.queries, machine.tile_queries)
    for t in set(shape[tokens > 0].tolist()):
        mine, programs = (shape == t) & (tokens > 0), int(machine.programs[t])
        times = partial(estimate, knots=machine.knots, at_knots=machine.estimates[t])
        each = times((tokens / parts)[mine])
        own = longest_first(np.repeat(each, (tiles * parts)[mine]), programs)
        kinds, count = np.unique(np.stack([tiles, tokens])[:, mine], axis=1, return_counts=True)
        tried = [[n for n in NUM_CHUNKS if n <= -(-size // machine.block)] for size in kinds[1]]
        if math.prod(map(len, tried)) > MOST_DIVISIONS:
            return {}
        divisions = np.array(list(product(*tried)), dtype=np.int64)
        slices, items = times(kinds[1] / divisions), kinds[0] * count * divisions
        bound = np.maximum((slices * items).sum(1) / programs, slices.max(1))
        best = own
        for at in np.argsort(bound)[:MOST_SCHEDULES]:
            if bound[at] < best:
                best = min(best, longest_first(np.repeat(slices[at], items[at]), programs))
        total += own, best, bound.min()
    return {"flashforge": _ratio(total[0], total[1]), "optimum": _ratio(total[1], total[2])}


# FlashForge's estimates


def estimate_rows(record: Path) -> Iterator[dict[str, Any]]:
    """``C_est`` against the times of a record of the set `policies`, for each head shape.

    - ``profile``: as `flashforge` takes it from the cost table, by profiled length and tile height.
    - ``tiles``: the time of an item and of a token, fitted for each tile shape.

    ``ratio`` and ``spread`` are the mean of a plan's longest-first makespan over its time, and the
    standard deviation of the logarithm. ``picks`` is the mean time of the plan with the least
    makespan over the fastest one's.
    """
    rows = read_json(record, RowsError)["rows"]
    names = dict.fromkeys(row["set"] for row in rows)
    forests = {(w.set, w.name): w.forest for name in names for w in read_set(name, None)[1]}
    for heads, kind in product(dict.fromkeys(row["heads"] for row in rows), ("profile", "tiles")):
        target, logs, picks = target_on_hopper(heads, "NVIDIA H200"), [], []
        for row in rows:
            if row["heads"] != heads:
                continue
            forest = forests[row["set"], row["workload"]]
            times = {"auto": row["us"].get("deft"), **row["us"]}
            us = {name: us for name, us in times.items() if us and name in ESTIMATED}
            found = {
                name: plan_makespan(name, forest, target, kind) / us[name] / 1e3 for name in us
            }
            logs += np.log(list(found.values())).tolist()
            least = min(us, key=lambda name: found[name] * us[name])
            picks.append(math.log(us[least] / min(us.values())))
        yield {
            "heads": heads,
            "estimator": kind,
            "plans": len(logs),
            "ratio": round(math.exp(np.mean(logs)), 2),
            "spread": round(float(np.std(logs)), 2),
            "picks": round(math.exp(np.mean(picks)), 3),
        }


def plan_makespan(name: str, forest: PrefixForest, target: Target, kind: str) -> float:
    """Nanoseconds of a policy's items, longest first, by one of the estimators."""
    machine = Machine(target, forest.batch_size)
    policy = cast(TwoRulePolicy, get_policy(name))
    ranges, parts = policy.divided_ranges(forest, target)
    shape = shapes_of(ranges.queries, machine.tile_queries)
    tiles = tiles_of(ranges.queries, machine.tile_queries)
    each, shapes, total = (ranges.end - ranges.begin) / parts, len(machine.tile_queries), 0.0
    for t in set(shape.tolist()):
        mine = shape == t
        times = machine.costs[t] + machine.costs[shapes + t] * each[mine]
        if kind == "profile":
            times = estimate(each[mine], machine.knots, machine.estimates[t])
        total += longest_first(np.repeat(times, (tiles * parts)[mine]), int(machine.programs[t]))
    return total


# The measured costs


class Choice(NamedTuple):
    """Edges, chunks of each range, and their ``measured`` cost in nanoseconds."""

    cost: float
    ranges: KVRanges
    parts: Int64Array


def priced(ranges: KVRanges, division: Int64Array | None, target: Target) -> Choice:
    """A division [R] of some ranges; without one, the cheapest chunk length of each tile shape."""
    machine = Machine(target, len(ranges.order))
    tokens = ranges.end - ranges.begin
    shape = shapes_of(ranges.queries, machine.tile_queries)
    tiles = tiles_of(ranges.queries, machine.tile_queries)
    parts_of_query = np.zeros(len(ranges.order), dtype=np.int64)
    for first, held in zip(ranges.first, ranges.queries, strict=True):
        parts_of_query[first : first + held] += 1
    several = parts_of_query[ranges.first] > 1
    beside = small_tiles(ranges.queries[shape == 0], tokens[shape == 0], machine)
    chosen, total = np.ones_like(tokens), float(beside[-1]) * machine.costs[-1]
    for t in set(shape.tolist()):
        mine = shape == t
        n, longest = tokens[mine], int(tokens[mine].max())
        if division is None:
            chunks = chunk_of(longest, np.array(NUM_CHUNKS), machine.block)
            parts = np.maximum(1, -(-n // chunks[:, None]))
        else:
            parts = division[None, mine]
        results = ((parts > 1) | several[mine]) * parts @ ranges.queries[mine]
        cut = Cut(
            chunk=(-(-n // (parts * machine.block)) * machine.block).max(1),
            longest=longest,
            items=parts @ tiles[mine],
            read=int(tiles[mine] @ n),
            stored=int(n.sum()),
            results=results,
            cut_queries=np.zeros_like(results),
            most=parts.max(1),
        )
        prices = cut_cost(cut, shape_costs(machine, t, beside))
        chosen[mine] = parts[prices.argmin()]
        total += float(prices.min())
    return Choice(total, ranges, chosen)


def choice_of(name: str, forest: PrefixForest, target: Target) -> Choice:
    """What a policy chooses, priced by the measured costs."""
    policy = cast(TwoRulePolicy, get_policy(name))
    return priced(*policy.divided_ranges(forest, target), target)


def assignments(forest: PrefixForest) -> Iterator[BoolArray]:
    """Every edge assignment, but for exchanges of equal leaves; if too many, by depth alone."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    depths: dict[int, list[int]] = {}
    depth = [0] * forest.num_nodes
    for node in np.flatnonzero(forest.parent >= 0).tolist():
        above = int(forest.parent[node])
        depth[node] = depth[above] + 1
        depths.setdefault(depth[node], []).append(node)
        leaf = (above, int(forest.length[node]))
        kinds.setdefault(leaf if forest.is_leaf[node] else (node,), []).append(node)
    numbers = [range(len(nodes) + 1) for nodes in kinds.values()]
    groups = list(kinds.values())
    if math.prod(map(len, numbers)) > MOST_ASSIGNMENTS:
        groups = list(depths.values())
        numbers = [range(0, len(nodes) + 1, len(nodes)) for nodes in groups]
    for cut in product(*numbers):
        is_cut = np.zeros(forest.num_nodes, dtype=np.bool_)
        for nodes, number in zip(groups, cut, strict=True):
            is_cut[nodes[:number]] = True
        yield is_cut


def best_choice(forest: PrefixForest, target: Target) -> Choice:
    """The least ``measured`` cost of all assignments, chunk lengths and policies."""
    found = [priced(grouped_ranges(forest, cut), None, target) for cut in assignments(forest)]
    found += [choice_of(name, forest, target) for name in POLICIES]
    return min(found, key=lambda choice: choice.cost)


@dataclass(frozen=True)
class Oracle(Policy):
    """The plan of the least measured cost, by exhaustion; for small forests."""

    name: ClassVar[str] = "oracle"

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """As :meth:`deft_backend.policies.Policy.group`."""
        best = best_choice(forest, target)
        return cut_ranges(best.ranges, forest.is_leaf, best.parts, target.block_tokens)


def gaps(forest: PrefixForest, target: Target) -> dict[str, Any]:
    """Each policy's cost over the optimum, by each model."""
    costs = EdgeCosts.of(target.costs.fasttree, target)
    greedy = edges_cost(forest, search_edges(forest, costs), costs)
    best = best_choice(forest, target).cost
    chosen = {name: choice_of(name, forest, target).cost for name in POLICIES}
    return {
        "edges": {"fasttree": _ratio(greedy, least_edges_cost(forest, costs))},
        "makespan": makespan_gaps(forest, target),
        "measured": {name: _ratio(cost, best) for name, cost in chosen.items()},
        "optimum_us": round(best / 1e3, 2),
    }


def _ratio(cost: float, best: float) -> float:
    return round(float(cost / best), 4) if best else 1.0


def target_on_hopper(heads: str, gpu: str = "") -> Target:
    """A Hopper GPU with this package's kernels in 16 bits, by its shipped table or an H100's."""
    query_heads, kv_heads = parse_heads(heads)
    on_cpu, dtype = torch.device("cpu"), torch.bfloat16
    shape = AttentionShape(query_heads, kv_heads, 128, dtype, dtype, on_cpu, 16)
    group, hopper = shape.gqa_group, Gpu.named("sm_90")
    target = target_of(kernel_configuration(128, dtype, on_cpu, group, hopper), shape)
    return replace(target, cost_model=shipped_for(replace(table_key(shape), gpu=gpu)))


def policy_gaps(
    name: Annotated[str, typer.Option("--set", help="A set of `kernel`.")] = "policy-gaps",
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path(
        "docs/results/policy-gaps.json"
    ),
) -> None:
    """Compare the policies with the optimum of their cost models; needs no GPU."""
    rows = []
    spec, workloads = read_set(name, None)
    for workload, heads in product(workloads, spec.heads):
        row = {"set": name, "tree": workload.name, "heads": heads}
        rows.append(row | gaps(workload.forest, target_on_hopper(heads)))
    write_rows(out, rows, provenance())

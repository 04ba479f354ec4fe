"""``python -m benchmarks planning-host``: time of the host planner on one core.

The planner builds the forest, groups its queries by a policy and fills the Plan's arrays. Each
batch shares 65,536 tokens of prefix through a tree of four levels with nodes of different lengths.
Times are medians in milliseconds, without compilation. ``total_ms`` runs from page tables to a
Plan. ``cold_ms`` is the same after the processor's caches were flushed.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.row_files import write_rows
from deft_backend.files.provenance import provenance
from deft_backend.forest import (
    PrefixForest,
    build_forest,
    forest_from_page_tables,
    forest_from_paths,
    forest_from_tree,
    warm_up,
)
from deft_backend.planner import PlanCapacity, plan_forest
from deft_backend.policies import Target, get_policy

PREFIX_TOKENS = 65536
FAN_OUTS = {64: (4, 4, 4), 256: (4, 8, 8), 1024: (8, 8, 16)}
"""Children of each node of the first three levels, by requests."""
PAGE_SIZES = (1, 16)
OWN_TOKENS = 512
SPARE_TOKENS = 4096
"""Tokens that fit the page tables in addition to the prefix."""
FLUSHED_BYTES = 1 << 28
COLD_REPEATS = 9


@dataclass(frozen=True)
class Batch:
    """One batch as input for each source of forests; all arrays are on the CPU.

    Attributes
    ----------
    page_tables : [B, P] int32
    seq_lens : [B] int32
    paths : [B] lists of (node, tokens)
        See :func:`~deft_backend.forest.forest_from_paths`.
    parent, depth : [T] int32; holder : [B] int32
        See :func:`~deft_backend.forest.forest_from_tree`.
    """

    page_tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    paths: list[list[tuple[int, int]]]
    parent: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    holder: npt.NDArray[np.int32]


def ragged_batch(
    fan_outs: tuple[int, ...],
    page_size: int,
    shuffled: bool,
    prefix_tokens: int = PREFIX_TOKENS,
    seed: int = 0,
) -> Batch:
    """One tree of ``len(fan_outs)`` shared levels with `prefix_tokens` on each path, and leaves.

    A shared node takes 50 to 100 % of an even part of its path's remaining tokens, in whole pages.
    A leaf holds up to :data:`OWN_TOKENS`. Requests are in depth-first order, or shuffled.
    """
    draw = random.Random(seed)
    parent, depth = [0], [0]
    pages = [np.zeros(0, dtype=np.int32)]
    next_page = 0
    level = [0]
    for lacking, fan_out in zip(range(len(fan_outs), -1, -1), (1, *fan_outs), strict=True):
        below = []
        for above in (node for node in level for _ in range(fan_out)):
            if lacking:
                even = (prefix_tokens - depth[above]) / lacking
                part = even if lacking == 1 else even * draw.uniform(0.5, 1.0)
                tokens = max(1, int(part) // page_size) * page_size
            else:
                tokens = draw.randint(1, OWN_TOKENS)
            held = -(-tokens // page_size)
            below.append(len(parent))
            parent.append(above)
            depth.append(depth[above] + tokens)
            pages.append(np.arange(next_page, next_page + held, dtype=np.int32))
            next_page += held
        level = below
    if shuffled:
        draw.shuffle(level)

    columns = (prefix_tokens + SPARE_TOKENS) // page_size
    tables = np.full((len(level), columns), -1, dtype=np.int32)
    paths = []
    for row, leaf in enumerate(level):
        path = [leaf]
        while parent[path[0]]:
            path.insert(0, parent[path[0]])
        held_pages = np.concatenate([pages[node] for node in path])
        tables[row, : len(held_pages)] = held_pages
        paths.append([(node, depth[node] - depth[parent[node]]) for node in path])
    return Batch(
        page_tables=tables,
        seq_lens=np.array([depth[node] for node in level], dtype=np.int32),
        paths=paths,
        parent=np.array(parent, dtype=np.int32),
        depth=np.array(depth, dtype=np.int32),
        holder=np.array(level, dtype=np.int32),
    )


def measure(batch: Batch, page_size: int, policy_name: str, repeats: int) -> dict[str, Any]:
    """Times of each source of forests, of the plan, and of both together."""
    lens = batch.seq_lens
    policy = get_policy(policy_name)
    target = Target(num_query_heads=32, num_kv_heads=8, head_dim=128)
    capacity = PlanCapacity.for_batch(len(lens))
    flushed = np.zeros(FLUSHED_BYTES, dtype=np.int8)

    def from_tables() -> PrefixForest:
        return forest_from_page_tables(batch.page_tables, lens, page_size, check=False)

    def flush() -> None:
        flushed[::64] += 1

    def whole_way() -> object:
        return plan_forest(from_tables(), policy, target, capacity)

    forest = from_tables()
    # Neighbours share the tokens up to the end of the deepest node that both attend to.
    shared = [
        max((int(forest.end[n]) for n in {*forest.path(i)} & {*forest.path(i + 1)}), default=0)
        for i in range(len(lens) - 1)
    ]
    neighbours = np.array(shared, dtype=np.int32)
    fresh: list[PrefixForest] = []

    def renew() -> None:  # a new forest, so that its derived arrays are not computed yet
        fresh[:] = [from_tables()]

    def source(call: Callable[[], object]) -> float:
        return median_ms(call, repeats)

    grouping = plan_forest(forest, policy, target, capacity)[1]
    return {
        "nodes": forest.num_nodes,
        "groups": grouping.num_groups,
        "tokens_stored": forest.tokens_stored,
        "tokens_attended": forest.tokens_attended,
        "page_tables_ms": source(from_tables),
        "paths_ms": source(lambda: forest_from_paths(batch.paths, lens, page_size)),
        "tree_ms": source(
            lambda: forest_from_tree(batch.parent, batch.depth, batch.holder, lens, page_size)
        ),
        "neighbours_ms": source(lambda: build_forest(forest.order, neighbours, lens, page_size)),
        "plan_ms": median_ms(
            lambda: plan_forest(fresh[0], policy, target, capacity), repeats, before=renew
        ),
        "total_ms": median_ms(whole_way, repeats),
        "cold_ms": median_ms(whole_way, COLD_REPEATS, before=flush),
    }


def median_ms(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Median wall time of a call in milliseconds; `before` runs untimed before each."""
    times = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(float(np.median(times)) * 1e3, 4)


def use_one_core() -> int | None:
    """Keep this process on one core; returns its number, or None if the system cannot do it."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def processor() -> str:
    """Model name of the CPU."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    found = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def measure_batches(
    out: Path,
    requests: Sequence[int] | None,
    policy: str,
    repeats: int,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Time planning for each batch size, page size and request order, and write the rows.

    Parameters
    ----------
    out : Path
        JSON file to write.
    requests : sequence of int, optional
        Batch sizes, out of :data:`FAN_OUTS`; None measures all of them.
    policy : str
    repeats : int
        Timed calls for each figure.
    on_row : callable
        Called with each row when it is measured.

    Raises
    ------
    PolicyError
        If there is no such policy; nothing has run then.
    RowsError
        If `out` cannot be written.
    """
    get_policy(policy)
    core = use_one_core()
    warm_up()
    rows = []
    for size in requests or FAN_OUTS:
        for page_size in PAGE_SIZES:
            for order in ("depth first", "shuffled"):
                batch = ragged_batch(FAN_OUTS[size], page_size, order == "shuffled")
                row: dict[str, Any] = {"requests": size, "page_size": page_size, "order": order}
                row |= measure(batch, page_size, policy, repeats)
                rows.append(row)
                on_row(row)
    header = {
        **provenance(),
        "processor": processor(),
        "core": core,
        "policy": policy,
        "repeats": repeats,
        "prefix_tokens": PREFIX_TOKENS,
        "fan_outs": {str(size): fan_outs for size, fan_outs in FAN_OUTS.items()},
        "heads": "32/8",
        "head_dim": 128,
    }
    write_rows(out, rows, header)

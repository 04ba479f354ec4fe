"""``python -m benchmarks kernel-check``: every supported combination against float64 attention.

Each combination of dtype, head dimension, head counts, page size and soft cap runs every policy on
a new random forest. Outputs and workspace are filled with NaN before the run. Several processes
compile and run the kernels at the same time.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.random_batches import random_batch
from benchmarks.row_files import write_rows
from deft_backend import POLICY_NAMES, TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.compile.usable_cpus import usable_cpus
from deft_backend.files.provenance import provenance
from deft_backend.kernels import HEAD_DIMS

TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}
HEADS = ((32, 8), (32, 32), (16, 1), (28, 4))
PAGE_SIZES = (1, 16, 64, 5)
SOFT_CAPS = (0.0, 30.0)

Shape = tuple[str, int, tuple[int, int], int, float]


def shapes() -> list[Shape]:
    """Every (dtype, head_dim, heads, page_size, soft cap)."""
    return list(itertools.product(TOLERANCE, HEAD_DIMS, HEADS, PAGE_SIZES, SOFT_CAPS))


def check_shape(job: tuple[Shape, str, int]) -> list[dict[str, Any]]:
    """Run every policy for one shape; returns one row for each policy."""
    (dtype_name, head_dim, heads, page_size, cap), device, seed = job
    dtype: torch.dtype = getattr(torch, dtype_name)
    query_heads, kv_heads = heads
    # One node needs enough queries to fill more than one of the largest tiles (128 queries).
    requests = max(24, 2 * 128 * kv_heads // query_heads + 9) if device == "cuda" else 9
    rows = []
    for number, policy in enumerate(POLICY_NAMES):
        batch = random_batch(
            seed + number, requests, page_size,
            longest=300 if device == "cuda" else 60, spare=40, single_tree=number % 2 == 0,
        )  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed * 31 + number)

        def normal(*size: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(dtype)

        q = normal(requests, query_heads, head_dim)
        k_cache = normal(batch.num_pages, page_size, kv_heads, head_dim)
        v_cache = normal(batch.num_pages, page_size, kv_heads, head_dim)
        attention = TreeAttention(
            num_query_heads=query_heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
            device=device, page_size=page_size, max_batch=requests, policy=policy,
        )  # fmt: skip
        forest = forest_from_page_tables(batch.page_table, batch.seq_lens, page_size)
        plan = attention.plan(forest)
        attention.poison_workspace()
        out = torch.full_like(q, float("nan"))
        table = torch.from_numpy(batch.page_table).to(device)
        lens = torch.from_numpy(batch.seq_lens).to(device) + 33  # grown since the plan was made
        attention.run(q, k_cache, v_cache, table, lens, logit_cap=cap, out=out)
        reference = reference_attention(q, k_cache, v_cache, table, lens, logit_cap=cap)
        error = relative_error(out, reference)
        rows.append(
            {
                "policy": policy, "dtype": dtype_name, "head_dim": head_dim,
                "heads": f"{query_heads}/{kv_heads}", "page_size": page_size, "soft_cap": cap,
                "batch": requests, "share": round(forest.share, 2), "items": plan.num_items,
                "tiles": plan.tile_ptr.tolist(), "error": error,
                "ok": error <= TOLERANCE[dtype_name],
            }
        )  # fmt: skip
    return rows


def check_all(
    out: Path, processes: int | None = None, seed: int = 0, limit: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Check the kernels in every supported combination and write a row for each policy and shape.

    Parameters
    ----------
    out : Path
        JSON file to write.
    processes : int, optional
        Worker processes that compile and run; None starts one for each core.
    seed : int
        Of the forests and of the data.
    limit : int
        Check only the first `limit` shapes; 0 checks all of them.

    Returns
    -------
    (dict, list of dict)
        Counts and largest errors; the rows whose error exceeds its tolerance.

    Raises
    ------
    RowsError
        If `out` cannot be written.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs: Iterable[tuple[Shape, str, int]]
    jobs = [(shape, device, seed + 1000 * i) for i, shape in enumerate(shapes())]
    jobs = jobs[:limit] if limit else jobs
    rows: list[dict[str, Any]] = []
    with (
        Progress(transient=True) as progress,
        multiprocessing.get_context("spawn").Pool(processes or usable_cpus()) as pool,
    ):
        task = progress.add_task("checking kernels", total=len(jobs))
        for found in pool.imap_unordered(check_shape, jobs):
            rows += found
            progress.advance(task)
    rows.sort(key=lambda r: (r["dtype"], r["head_dim"], r["heads"], r["page_size"], r["soft_cap"]))
    failed = [row for row in rows if not row["ok"]]
    summary = {
        "cases": len(rows),
        "failed": len(failed),
        "tolerance": TOLERANCE,
        "largest_error": {
            name: max((r["error"] for r in rows if r["dtype"] == name), default=None)
            for name in TOLERANCE
        },
    }
    write_rows(out, rows, {**provenance(), **summary})
    return summary, failed

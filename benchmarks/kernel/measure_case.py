"""Check and then time every method on every case."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from benchmarks.ceilings import Ceilings
from benchmarks.kernel.batched_reference import batched_reference
from benchmarks.kernel.case_inputs import Inputs, make_inputs
from benchmarks.kernel.kernel_rows import Row
from benchmarks.kernel.methods import OURS, Method, Prepared, Refused
from benchmarks.kernel.methods.ours import Ours
from benchmarks.kernel.sets import Spec
from benchmarks.kernel.tree_workloads import Case
from benchmarks.kernel.turns import Turns
from deft_backend.attention.reference_attention import relative_error
from deft_backend.tools.tuning.measure import captured, launch_us

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error above which a result is wrong: several times the error of rounding."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

SAME = "same"
KV_DTYPES = {SAME: None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes of the cache by the hosts' names; SAME is the dtype of the queries."""


class DeviceLost(RuntimeError):
    """The device no longer works; earlier rows are valid."""


@dataclass(frozen=True)
class Setup:
    """The settings of all cases.

    - `spec`: of the set.
    - `ours`: our method; `peers` are the methods that it is compared with.
    - `device`: a GPU, or the CPU. On the CPU, results are checked and nothing is timed.
    - `ceilings`: ceilings of the device; None on the CPU.
    - `unavailable`: why a peer cannot run on this machine, by name; every row repeats it.
    """

    spec: Spec
    ours: Ours
    peers: Sequence[Method]
    device: torch.device
    rep_ms: int
    ceilings: Ceilings | None
    unavailable: dict[str, str]


_turns: Turns | None = None  # between processes that measure cases side by side


@contextmanager
def pooled(processes: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` whose calls several `processes` share, for :func:`measure`."""
    if processes == 1:
        yield map
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, _begin, (Turns(spawn),)) as pool:
        yield pool.map


def measure(
    cases: Sequence[Case], setup: Setup, mapped: Callable[..., Iterator[Any]] = map
) -> Iterator[Row]:
    """Yield one row for each case, in order. Several processes prepare and check cases side by
    side; each method is timed alone.

    Raises DeviceLost if a method left the device unusable, or ended its process.
    """
    torch.cuda.empty_cache()  # what measured the ceilings
    try:
        yield from mapped(_measured, cases, repeat(setup))
    except BrokenProcessPool:
        raise DeviceLost(
            "a process that measured has ended; if memory was short, ask for fewer --processes. "
            "The rows so far are kept"
        ) from None


def _begin(turns: Turns) -> None:
    global _turns
    _turns = turns
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a process that waits for its turn, too


def _measured(case: Case, setup: Setup) -> Row:
    with nullcontext() if _turns is None else _turns.shared():
        row = measure_case(case, setup)
        torch.cuda.empty_cache()
    return row


def measure_case(case: Case, setup: Setup) -> Row:
    """Check and time every method on one case."""
    spec = setup.spec
    dtypes = DTYPES[spec.dtype], KV_DTYPES[spec.kv_dtype]
    inputs = make_inputs(case, spec.head_dim, *dtypes, setup.device, spec.layout, spec.seed)
    seen = torch.from_numpy(inputs.seen) if inputs.query_tokens > 1 else None
    reference = batched_reference(*inputs.attended, seen)
    row = Row(
        set=case.workload.set,
        workload=case.workload.name,
        heads=case.heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        page_size=case.page_size,
        layout=spec.layout,
        batch=inputs.batch,
        tokens_stored=inputs.tables.tokens_stored,
        tokens_attended=inputs.tables.tokens_attended,
        share=round(inputs.tables.tokens_attended / max(1, inputs.tables.tokens_stored), 3),
        policy=setup.ours.policy,
        roof_us=None if setup.ceilings is None else round(roof_us(inputs, setup.ceilings), 3),
        us={},
        error={},
        skipped=dict(setup.unavailable),
        facts={},
        repeatable=None,
        plan_us=None,
        query_tokens=inputs.query_tokens,
        mask="chain" if inputs.ancestors is None else "tree",
        kv_dtype=spec.dtype if spec.kv_dtype == SAME else spec.kv_dtype,
        node_std=round(float(np.std(inputs.forest.length)), 1),
    )
    for method in (setup.ours, *setup.peers):
        _measure_method(method, inputs, reference, setup, row)
    return row


def _measure_method(
    method: Method, inputs: Inputs, reference: torch.Tensor, setup: Setup, row: Row
) -> None:
    name = method.name
    row["us"][name] = row["error"][name] = None
    try:
        prepared = method.prepare(inputs)
        launch, out = _launcher(prepared, setup)
        error, first = _checked(prepared, launch, out, reference)
        row["error"][name] = float(f"{error:.3g}") if math.isfinite(error) else None
        if prepared.facts:
            row["facts"][name] = dict(prepared.facts)
        if not error <= (prepared.tolerance or TOLERANCE[inputs.q.dtype]):
            row["skipped"][name] = f"wrong result: relative error {error:.3g}"
            return
        if name == OURS:
            launch()
            row["repeatable"] = torch.equal(out, first)
        if setup.device.type == "cuda":
            row["us"][name] = round(_alone_us(launch, setup), 3)
            if name == OURS and prepared.plan is not None:
                row["plan_us"] = round(_alone_us(captured(prepared.plan)[0], setup), 2)
    except Refused as reason:
        row["skipped"][name] = str(reason)
    except Exception as failure:  # another package's kernel may raise anything; the run continues
        row["skipped"][name] = f"failed: {type(failure).__name__}: {failure}".splitlines()[0][:200]
        _still_there(setup.device, name, failure)


def _alone_us(launch: Callable[[], object], setup: Setup) -> float:
    torch.cuda.synchronize(setup.device)
    with nullcontext() if _turns is None else _turns.alone():
        return launch_us(launch, setup.rep_ms)


def _launcher(prepared: Prepared, setup: Setup) -> tuple[Callable[[], object], torch.Tensor]:
    """The launch to time, and the tensor that it writes."""
    if setup.device.type == "cuda":
        return captured(prepared.launch)
    return prepared.launch, prepared.launch()


def _checked(
    prepared: Prepared, launch: Callable[[], object], out: torch.Tensor, reference: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Relative error of the timed launch's own result, and that result; all NaN before."""
    out.fill_(math.nan)
    if prepared.poison is not None:
        prepared.poison()
    result = launch()
    found = out if result is None else result
    assert isinstance(found, torch.Tensor)
    wanted = reference if prepared.rows is None else reference[prepared.rows]
    return relative_error(found, wanted), found.clone()


def _still_there(device: torch.device, name: str, failure: Exception) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        raise DeviceLost(
            f"the GPU no longer works after {name} failed ({failure}). The rows so far are kept; "
            "run the other cases again without that method"
        ) from failure


def roof_us(inputs: Inputs, ceilings: Ceilings) -> float:
    """A lower bound for the microseconds of any kernel, from ceilings measured in the same run.

    The larger of two times. One is for the bytes that must move (KV once, queries in, outputs out)
    at the read bandwidth. The other is for the operations of :attr:`Inputs.flops` at the rate of a
    matrix product.
    """
    moved = inputs.kv_bytes + 2 * inputs.q.nbytes
    return max(moved / ceilings.read_gb_s / 1e3, inputs.flops / ceilings.tflop_s / 1e6)

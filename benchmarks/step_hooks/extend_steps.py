"""Short extends in vLLM's engine: steps with tree attention and with vLLM's own kernel, in turn.

One engine in this process computes the same kind of batch in both ways: requests that find a prefix
in the cache and compute a few new tokens each. The time of a step is that of the model's forward,
until the GPU is idle.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.e2e.served_model import SHAPES, write_model
from benchmarks.row_files import write_rows
from deft_backend.files.provenance import provenance
from deft_backend.hosts.vllm.versions import backend_name

if TYPE_CHECKING:
    from deft_backend.hosts.vllm.report.server import Server

WARM_UPS = 2

Case = tuple[int, int, int]
"""Requests, tokens of the prefix, new tokens of each request."""

BEAMS: tuple[Case, ...] = tuple((64, 4096, new) for new in range(2, 17))
"""The steps of a beam search: vLLM computes the last partial block of every beam again."""

TURNS: tuple[Case, ...] = (
    (4, 4096, 4), (16, 2048, 4), (16, 4096, 4), (16, 4096, 8), (64, 2048, 8), (16, 16384, 4),
    (16, 16384, 8), (64, 16384, 2), (64, 16384, 4), (64, 16384, 8),
)  # fmt: skip
"""Second turns and calls of tools."""

CPU_CASES: tuple[Case, ...] = ((4, 96, 3), (4, 96, 8))
CPU_SETTINGS = {
    "DEFT_MIN_BATCH": "1",
}  # fmt: skip
"""Small batches go through tree attention, too: these runs check results, not times."""


def measure_extends(
    out: Path, repeats: int, options: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> None:
    """Write one row for each case; `options` are further arguments of vLLM's ``LLM``."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "DEFT_SHORT_EXTENDS": "16"}
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ |= CPU_SETTINGS
        options = {**options, "block_size": 16}  # of more tokens, a prefix fills none
    shape = "llama-3.1-8b" if on_gpu else "tiny"
    cases = (*BEAMS, *TURNS) if on_gpu else CPU_CASES
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, "dummy", "bfloat16" if on_gpu else "float32")
        engine = _engine(model.path, cases, options)
        steps = _Steps(engine, SHAPES[shape]["vocab_size"] - 2)
        rows = []
        for case in cases:
            rows.append(steps.row(case, repeats))
            show(rows[-1])
            write_rows(out, rows, {**provenance(), "shape": shape, "repeats": repeats})


def _engine(path: str, cases: tuple[Case, ...], options: dict[str, Any]) -> Any:
    from vllm import LLM

    longest = max(prefix + new for _, prefix, new in cases)
    return LLM(
        model=path, load_format="dummy", skip_tokenizer_init=True, disable_log_stats=True,
        attention_backend=backend_name(), max_model_len=longest + 16, enforce_eager=True,
        max_num_seqs=max(requests for requests, _, _ in cases), **options,
    )  # fmt: skip


class _Steps:
    """Runs batches on an engine and times the one step that computes all of a batch."""

    def __init__(self, engine: Any, ids: int) -> None:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from deft_backend.hosts.vllm.report.server import _current

        assert _current is not None
        self._engine, self._ids, self._server = engine, random.Random(0), _current
        self._most = ids
        self._times: list[tuple[int, float]] = []
        original = WorkerWrapperBase.execute_model

        def execute_model(worker: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
            _synchronize()
            began = time.perf_counter()
            result = original(worker, message, *args, **kwargs)
            _synchronize()
            self._times.append((len(message.num_scheduled_tokens), time.perf_counter() - began))
            return result

        WorkerWrapperBase.execute_model = execute_model

    def row(self, case: Case, repeats: int) -> dict[str, Any]:
        """Times of a case, in turn with and without tree attention, after a checked step."""
        requests, prefix, new = case
        shared = self._draw(prefix)
        self._answer([shared + self._draw(1)])
        row: dict[str, Any] = {"requests": requests, "prefix": prefix, "new": new}
        state = self._server.state
        assert state is not None
        before = state.short_extends
        with _checked(self._server):
            self._step(case, shared)
        row["through_tree"] = state.short_extends > before
        times: dict[str, list[float]] = {"tree": [], "host": []}
        for _ in range(WARM_UPS + repeats):
            times["tree"].append(self._step(case, shared))
            with _left_to_the_host():
                times["host"].append(self._step(case, shared))
        for name, found in times.items():
            counted = [1e3 * seconds for seconds in found[WARM_UPS:]]
            row[f"{name}_ms"] = round(statistics.median(counted), 3)
            row[f"{name}_runs_ms"] = [round(each, 3) for each in counted]
        row["ratio"] = round(row["tree_ms"] / row["host_ms"], 3)
        failed = next((g.failure.reason for g in self._server.groups.values()), None)
        assert failed is None, failed
        return row

    def _step(self, case: Case, shared: list[int]) -> float:
        requests, _, new = case
        self._times.clear()
        self._answer([shared + self._draw(new) for _ in range(requests)])
        return next(seconds for scheduled, seconds in self._times if scheduled == requests)

    def _answer(self, prompts: list[list[int]]) -> None:
        from vllm import SamplingParams

        self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False,
        )  # fmt: skip

    def _draw(self, tokens: int) -> list[int]:
        return [self._ids.randrange(self._most) for _ in range(tokens)]


@contextmanager
def _left_to_the_host() -> Iterator[None]:
    # Imported late: on the CPU, vLLM must start before anything imports Numba.
    from deft_backend.hosts.common.short_extends import ShortExtends

    size_for = ShortExtends.size_for
    ShortExtends.size_for = lambda self, longest: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShortExtends.size_for = size_for  # type: ignore[method-assign]


@contextmanager
def _checked(server: Server) -> Iterator[None]:
    """Every layer of short extends is compared with the host's result, as by DEFT_VERIFY."""
    extends = [group.short_extends for group in server.groups.values()]
    groups = [each.group for each in extends if each is not None]
    for group in groups:
        group.settings = replace(group.settings, verify=True)
    try:
        yield
    finally:
        for group in groups:
            group.settings = replace(group.settings, verify=False)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

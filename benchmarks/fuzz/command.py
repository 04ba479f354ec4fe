"""``python -m benchmarks fuzz``: the strategies of the tests' properties, for a long time."""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated, Any

import hypothesis
import torch
import typer
from hypothesis import HealthCheck, Phase, given

from benchmarks.e2e.command import typed_command
from benchmarks.fuzz.examples import Counts, Example, Runner, attention_examples
from benchmarks.row_files import make_folder, write_rows
from deft_backend.files.provenance import provenance

EXAMPLES = 8
"""Examples of a round; the time is looked at between rounds."""


def work(seconds: float, seed: int, share: float, now: Path) -> Counts:
    """Run examples until time is up; `now` holds the one that runs, if this process dies."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(share)
    runner = Runner(torch.device("cuda" if on_gpu else "cpu"))
    seeds = 64 if on_gpu else 2
    dtypes = ("bfloat16", "float16") if on_gpu else ("bfloat16", "float16", "float32")
    strategy = attention_examples(dtypes, large=on_gpu, seeds=seeds)
    end = time.monotonic() + seconds

    def one(example: Example) -> None:
        if runner.counts.plans == 0 or time.monotonic() < end:
            now.write_text(json.dumps(example.to_dict()))
            runner.run(example)

    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        hypothesis.seed(1000 * seed + rounds)(settings(given(strategy)(one)))()
        rounds += 1
    return runner.counts


def run(seconds: float, seed: int, processes: int, folder: Path) -> dict[str, Any]:
    """The row of the examples of all processes."""
    began = time.monotonic()
    total = Counts()
    files = [folder / f"fuzz-{number}.json" for number in range(processes)]
    spawn = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, mp_context=spawn) for _ in files]  # one may die alone
    share = min(0.5, 0.75 / processes)
    running = [
        pool.submit(work, seconds, processes * seed + number, share, now)
        for number, (pool, now) in enumerate(zip(pools, files, strict=True))
    ]
    for ended, now in zip(running, files, strict=True):
        try:
            total.add(ended.result())
        except (BrokenProcessPool, RuntimeError) as error:
            last = json.loads(now.read_text()) if now.is_file() else {}
            total.failures.append({**last, "why": f"its process ended: {error}"})
        finally:
            now.unlink(missing_ok=True)
    for pool in pools:
        pool.shutdown()
    return {"what": "attention", "seconds": round(time.monotonic() - began, 1), **vars(total)}


def fuzz(
    out: Annotated[Path, typer.Option(help="JSON file of what ran.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to run.")] = 60.0,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes, each with examples of its own.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Another seed runs other examples.")] = 0,
) -> None:
    """Compare attention with a plain reference, and walk the plans of the CPU.

    Requests have one query token or several, as chains and as token trees. KV caches have 16 or 8
    bits and the layouts of hosts. Some attention has sinks or a soft cap. A failing example is in
    the record, as tests/benchmarks/fuzz_cases.json holds those that the tests replay. Exits with 1
    if one fails.
    """
    make_folder(out)
    row = run(seconds, seed, processes, out.parent)
    write_rows(out, [row], {**provenance(), "command": typed_command()})
    typer.echo(
        f"{row['plans']} plans in {row['seconds']} s; {len(row['failures'])} failures; largest "
        f"errors {row['largest_error']}"
    )
    for failure in row["failures"][:20]:
        typer.echo(f"FAILED {json.dumps(failure)}")
    raise typer.Exit(bool(row["failures"]))

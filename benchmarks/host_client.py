"""Loads of ``python -m benchmarks load`` through the host's own benchmark client.

``vllm bench serve`` sends text; SGLang's ``bench_serving`` sends token ids, and turns as text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.e2e.launch import ChoiceError

# The command `vllm` looks up a distribution that the CPU build lacks.
VLLM_CLIENT = """from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
add_cli_args(parser := ArgumentParser()); main(parser.parse_args())"""


def check_loads(host: str, loads: Sequence[Any], *, by_host: bool) -> None:
    """Raise ChoiceError if a load has several turns, and the client sends only one."""
    turns = next((load.name for load in loads if load.turns > 1), None)
    if turns and not (by_host and host == "sglang"):
        raise ChoiceError(f"{turns} has several turns; expected SGLang and --clients 0")


def client_command(host: str, path: str, warm: int, out: Path, url: str, load: Any) -> list[str]:
    """The client's command for a load on a server of the checkpoint at `path`; `out` gets JSON."""
    seed = crc32(load.seed.encode())  # other prompts than those in the cache
    options: dict[str, Any] = {"base-url": url, "model": path, "num-prompts": load.requests}
    options |= {"request-rate": load.rate or "inf", "seed": seed}
    if host == "vllm":
        module = ["-c", VLLM_CLIENT, "--save-result", "--ignore-eos"]
        options |= {"num-warmups": warm, "percentile-metrics": "ttft,tpot,itl"}
        options |= {"metric-percentiles": "50,95,99", "random-range-ratio": 0}
        options |= {"result-dir": out.parent, "result-filename": out.name}
        group, dataset, prefix, own = "prefix-repetition-", "prefix_repetition", "prefix", "suffix"
        options |= {f"{group}num-prefixes": load.prefixes}
    else:
        module = ["-m", "sglang.bench_serving", "--backend"]
        module += ["sglang-oai-chat"] if load.turns > 1 else ["sglang", "--tokenize-prompt"]
        options |= {"warmup-requests": warm, "output-file": out, "random-range-ratio": 1}
        group, dataset = "gsp-", "generated-shared-prefix"
        prefix, own, each = "system-prompt", "question", load.requests // max(1, load.prefixes)
        options |= {f"{group}num-groups": load.prefixes, f"{group}num-turns": load.turns}
        options |= {f"{group}prompts-per-group": each}
    lengths = {f"{prefix}-len": load.prefix, f"{own}-len": load.own, "output-len": load.gen}
    if not load.prefixes:
        options = {name: value for name, value in options.items() if not name.startswith(group)}
        group, dataset = "random-", "random" if host == "vllm" else "random-ids"
        lengths = {"input-len": load.own, "output-len": load.gen}
    options |= {"dataset-name": dataset, **{f"{group}{n}": tokens for n, tokens in lengths.items()}}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, *module, *words]


def figures_by_host(
    host: str, path: str, warm: int, logs: Path, url: str, load: Any, *_: Any
) -> dict[str, Any]:
    """The row of a load; if the client fails, the row has a failure and no figures."""
    environment, log = dict(os.environ), logs / "client.log"
    with tempfile.TemporaryDirectory() as folder, log.open("a") as said:
        out = Path(folder) / "client.json"
        if find_spec("datasets") is None:  # SGLang's client imports the package without need
            (out.parent / "datasets.py").write_text("load_dataset = None\n")
            paths = (folder, environment.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = client_command(host, path, warm, out, url, load)
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=said, stderr=said, env=environment, timeout=900)
        found = json.loads(out.read_text().splitlines()[-1]) if out.exists() else {}
    done = found.get("completed", 0)
    failed = [f"{done} of {load.requests} answered: see {log}"] if done < load.requests else []
    names = {"mean": "mean", "p50": "median", "p95": "p95", "p99": "p99"} if found else {}
    row = {"load": load.name, "rate": load.rate, "requests": load.requests}
    row |= {"duration_s": found.get("duration"), "tpot_ms": found.get("mean_tpot_ms")}
    for metric in ("ttft_ms", "itl_ms"):
        row[metric] = {n: round(found[f"{names[n]}_{metric}"], 3) for n in names} or None
    row["output_tokens_per_s"] = found.get("output_throughput")
    return {**row, "failures": len(failed), "first_failures": failed}

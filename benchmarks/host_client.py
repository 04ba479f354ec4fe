"""Loads of ``python -m benchmarks load`` through the host's own benchmark client.

``vllm bench serve`` sends text. SGLang's ``bench_serving`` sends token ids, and conversations of
several turns as text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

from benchmarks.e2e.launch import ChoiceError

SECONDS = 900

# The command `vllm` looks up a distribution that the CPU build lacks.
VLLM_CLIENT = """from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
add_cli_args(parser := ArgumentParser())
main(parser.parse_args())"""


def check_loads(host: str, loads: Sequence[Any], *, by_host: bool) -> None:
    """Raise ChoiceError if a load has several turns, and the client sends only one."""
    turns = next((load.name for load in loads if load.turns > 1), None)
    if turns and not (by_host and host == "sglang"):
        raise ChoiceError(f"{turns} has several turns; expected SGLang and --clients 0")


def client_command(host: str, path: str, warm: int, out: Path, url: str, load: Any) -> list[str]:
    """The client's command for a load on a server of the checkpoint at `path`; `out` gets JSON."""
    rate = "inf" if load.rate is None else load.rate
    seed = crc32(f"{load.name} {load.rate}".encode())  # other prompts than those in the cache
    options: dict[str, Any] = {
        "base-url": url,
        "model": path,
        "num-prompts": load.requests,
        "seed": seed,
    }
    options |= {"request-rate": rate}
    if host == "vllm":
        module = ["-c", VLLM_CLIENT, "--save-result", "--ignore-eos"]
        options |= {"num-warmups": warm, "percentile-metrics": "ttft,tpot,itl"}
        options |= {"metric-percentiles": "50,95,99", "random-range-ratio": 0}
        options |= {"result-dir": out.parent, "result-filename": out.name}
        group, dataset, prefix, suffix = (
            "prefix-repetition-",
            "prefix_repetition",
            "prefix",
            "suffix",
        )
        options |= {"prefix-repetition-num-prefixes": load.prefixes}
    else:
        module = ["-m", "sglang.bench_serving", "--backend"]
        module += ["sglang-oai-chat"] if load.turns > 1 else ["sglang", "--tokenize-prompt"]
        options |= {"warmup-requests": warm, "output-file": out, "random-range-ratio": 1}
        group, dataset, prefix, suffix = (
            "gsp-",
            "generated-shared-prefix",
            "system-prompt",
            "question",
        )
        options |= {"gsp-num-groups": load.prefixes, "gsp-num-turns": load.turns}
        options |= {"gsp-prompts-per-group": load.requests // max(1, load.prefixes)}
    lengths = {f"{prefix}-len": load.prefix, f"{suffix}-len": load.own, "output-len": load.gen}
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
    with tempfile.TemporaryDirectory() as folder, log.open("a") as written:
        out = Path(folder) / "client.json"
        if find_spec("datasets") is None:  # SGLang's client imports the package without need
            (out.parent / "datasets.py").write_text("load_dataset = None\n")
            paths = (folder, environment.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = client_command(host, path, warm, out, url, load)
        ended = subprocess.run(
            command,
            stdout=written,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            env=environment,
            check=False,
        )
        found = json.loads(out.read_text().splitlines()[-1]) if out.exists() else {}
    failed = [] if found else [f"the client ended with {ended.returncode}: see {log}"]
    if found and found["completed"] < load.requests:
        failed.append(f"{found['completed']} of {load.requests} requests have an answer")

    def spread(metric: str) -> dict[str, float] | None:
        names = {"mean": "mean", "p50": "median", "p95": "p95", "p99": "p99"}.items()
        return (
            {n: round(found[f"{theirs}_{metric}_ms"], 3) for n, theirs in names} if found else None
        )

    return {
        "load": load.name,
        "rate": load.rate,
        "requests": load.requests,
        "duration_s": found.get("duration"),
        "ttft_ms": spread("ttft"),
        "itl_ms": spread("itl"),
        "tpot_ms": found.get("mean_tpot_ms"),
        "output_tokens_per_s": found.get("output_throughput"),
        "failures": len(failed),
        "first_failures": failed,
    }

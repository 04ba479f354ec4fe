"""The hosts' own serving benchmarks as clients; their figures become rows."""

from __future__ import annotations

import asyncio
import json
import os
import site
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e.served_model import Model
from benchmarks.e2e.serving_rows import Row

GENERATED_SHARED_PREFIX: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "64-groups": (
        "--gsp-num-groups", "64", "--gsp-prompts-per-group", "32",
        "--gsp-system-prompt-len", "4096", "--gsp-question-len", "64", "--gsp-output-len", "128",
    ),
    "tiny": (
        "--gsp-num-groups", "3", "--gsp-prompts-per-group", "4",
        "--gsp-system-prompt-len", "128", "--gsp-question-len", "8", "--gsp-output-len", "8",
    ),
    "evicting": (
        "--gsp-num-groups", "8", "--gsp-prompts-per-group", "3",
        "--gsp-system-prompt-len", "256", "--gsp-question-len", "8", "--gsp-output-len", "8",
    ),
}  # fmt: skip
"""Shapes of SGLang's ``generated-shared-prefix``. Its default has 64 groups of 16 prompts on 2,048
tokens. ``tiny`` and ``evicting`` are for a machine without a GPU."""

PREFIX_REPETITION: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "64-groups": (
        "--num-prompts", "2048", "--prefix-repetition-num-prefixes", "64",
        "--prefix-repetition-prefix-len", "4096", "--prefix-repetition-suffix-len", "64",
        "--prefix-repetition-output-len", "128",
    ),
    "tiny": (
        "--num-prompts", "12", "--prefix-repetition-num-prefixes", "3",
        "--prefix-repetition-prefix-len", "128", "--prefix-repetition-suffix-len", "8",
        "--prefix-repetition-output-len", "8",
    ),
    "evicting": (
        "--num-prompts", "24", "--prefix-repetition-num-prefixes", "8",
        "--prefix-repetition-prefix-len", "256", "--prefix-repetition-suffix-len", "8",
        "--prefix-repetition-output-len", "8",
    ),
}  # fmt: skip
"""Shapes of vLLM's ``prefix_repetition``. Its default has 1,000 prompts on 10 prefixes of 256
tokens."""

_END = 4000
"""Characters of a client's log in an error: vLLM's client prints a long table after its errors."""

DATASETS = {"sglang": "generated-shared-prefix", "vllm": "prefix_repetition"}

# vLLM's CPU build lacks the `vllm` command, but has the modules behind it.
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class HostClientError(RuntimeError):
    """The host's client failed; the message holds the end of its log."""


@dataclass(frozen=True)
class HostClient:
    """One run of a host's own serving benchmark.

    Attributes
    ----------
    host, shape : str
    timeout : float
        Time limit in seconds.
    seed : int
        Seed of its prompts.
    answers : bool
        Whether its figures also hold the answers (``generated_texts``), which are then greedy.
    served_name : str, optional
        The model's name in requests; None means its path. A vLLM server refuses all other names.
    """

    host: str
    shape: str
    timeout: float = 540.0
    seed: int = 42
    answers: bool = False
    served_name: str | None = None

    @property
    def workload(self) -> str:
        """The workload's name in rows."""
        return f"{DATASETS[self.host]}:{self.shape}"

    def command(self, url: str, model: Model, out: Path) -> list[str]:
        """The command line, which writes its figures to `out`."""
        common = ["--base-url", url, "--model", model.path, "--tokenizer", model.path]
        common += ["--seed", str(self.seed)]
        if self.served_name is not None:
            common += ["--served-model-name", self.served_name]
        if self.host == "sglang":
            return [
                sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", *common,
                "--dataset-name", "generated-shared-prefix", "--output-file", str(out),
                *GENERATED_SHARED_PREFIX[self.shape],
                *(["--output-details"] if self.answers else []),
            ]  # fmt: skip
        return [
            sys.executable, "-c", _VLLM_BENCH, *common, "--dataset-name", "prefix_repetition",
            "--ignore-eos", "--save-result", "--result-dir", str(out.parent),
            "--result-filename", out.name, "--percentile-metrics", "ttft,tpot,itl",
            "--metric-percentiles", "50,99", *PREFIX_REPETITION[self.shape],
            *(["--save-detailed", "--temperature", "0"] if self.answers else []),
        ]  # fmt: skip

    async def run(
        self, url: str, model: Model, environment: Mapping[str, str], folder: Path
    ) -> Any:
        """Run the client to its end and return its figures. It ends if the waiting task ends.

        The client keeps its cache of prompts next to `folder`, for the other backends. In the
        user's home, only the sizes name that cache, so the client could read prompts of another
        tokenizer.

        Raises
        ------
        HostClientError
            If it fails, takes too long, or a request failed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.shape}-{self.seed}"
        out, log = folder / f"{name}.json", folder / f"{name}.log"
        out.unlink(missing_ok=True)
        surroundings = {
            "HOME": str(folder.parent / "home"), "PYTHONUSERBASE": site.getuserbase(),
            "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(url, model, out), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env={**os.environ, **environment, **surroundings},
            )  # fmt: skip
            try:
                await asyncio.wait_for(_ended(process), self.timeout)
            except asyncio.TimeoutError:
                raise HostClientError(
                    f"{self.workload} did not end within {self.timeout:.0f} s; {_end_of(log)}"
                ) from None
            finally:  # do not await here: the task may be cancelled again
                process.kill()
                process.wait()
        if process.returncode or not out.is_file():
            raise HostClientError(
                f"{self.workload} ended with {process.returncode}; {_end_of(log)}"
            )
        figures = json.loads(out.read_text().splitlines()[-1])
        self._check(figures, log)
        return figures

    def _check(self, figures: Mapping[str, Any], log: Path) -> None:
        """Raise if a request failed or got no answer."""
        try:
            completed, failed = int(figures["completed"]), int(figures.get("failed") or 0)
        except (KeyError, TypeError, ValueError) as error:
            raise HostClientError(
                f"{self.workload}: figures without {error}; {_end_of(log)}"
            ) from error
        asked = requests_of(self)
        if failed or completed != asked:
            raise HostClientError(
                f"{self.workload}: {completed} requests were answered and {failed} failed; {asked} "
                f"were sent; {_end_of(log)}"
            )


def _end_of(log: Path) -> str:
    """The last words of a client, without the leaks that Triton's bindings report after them."""
    said = log.read_text(errors="replace").partition("nanobind: leaked")[0]
    return f"its log is {log}, which ends with: {said[-_END:]}"


async def _ended(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        await asyncio.sleep(0.1)


def fill(row: Row, runs: Sequence[Mapping[str, Any]]) -> None:
    """Put the medians of a client's runs into a row.

    Parameters
    ----------
    row : Row
    runs : sequence of mapping
        One mapping for each run, at least one. Both hosts use the keys that are read here.

    Raises
    ------
    HostClientError
        If a figure is missing.
    """

    def median(key: str, digits: int | None = None) -> float:
        try:
            found = statistics.median(float(figures[key]) for figures in runs)
        except (KeyError, TypeError, ValueError) as error:
            raise HostClientError(f"{row['workload']}: figures without {error}") from error
        return found if digits is None else round(found, digits)

    row["tpot_ms"] = median("median_tpot_ms", 4)
    row["ttft_ms"] = median("median_ttft_ms", 3)
    row["ttft_p99_ms"] = median("p99_ttft_ms", 3)
    row["itl_p50_ms"] = median("median_itl_ms", 3)
    row["itl_p99_ms"] = median("p99_itl_ms", 3)
    row["tokens_per_s"] = median("output_throughput", 2)
    row["detail"] |= {
        "requests": int(runs[0]["completed"]), "seconds": median("duration"),
        "input_tokens": runs[0].get("total_input_tokens"),
        "output_tokens": runs[0].get("total_output_tokens"),
        "mean_ttft_ms": median("mean_ttft_ms"), "requests_per_s": median("request_throughput"),
        "ttft_runs_ms": [round(float(figures["median_ttft_ms"]), 3) for figures in runs],
        "tokens_per_s_runs": [round(float(figures["output_throughput"]), 2) for figures in runs],
    }  # fmt: skip


def requests_of(client: HostClient) -> int:
    """The number of requests of a shape."""
    shapes = GENERATED_SHARED_PREFIX if client.host == "sglang" else PREFIX_REPETITION
    options = shapes[client.shape]
    given = dict(zip(options[::2], options[1::2], strict=True))
    if client.host == "vllm":
        prefixes = int(given.get("--prefix-repetition-num-prefixes", 10))
        return int(given.get("--num-prompts", 1000)) // prefixes * prefixes
    groups = int(given.get("--gsp-num-groups", 64))
    return groups * int(given.get("--gsp-prompts-per-group", 16))

"""Workloads of an end-to-end run: each measures a running server and makes a row."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.e2e import host_clients, kept_answers
from benchmarks.e2e.backends import Launch
from benchmarks.e2e.batch_timing import measure
from benchmarks.e2e.checked_answers import check, load_samples, save_samples
from benchmarks.e2e.memory import growth, memory_of
from benchmarks.e2e.mixed_traffic import Seen, Traffic, drive
from benchmarks.e2e.plain_check import check_in_process
from benchmarks.e2e.prompt_cases import Case
from benchmarks.e2e.serving_rows import Row, case_of, make_row
from benchmarks.e2e.tree_replay import replay_tree
from benchmarks.token_client.client import Client
from deft_backend.tools.servers.process import ServerProcess
from deft_backend.tools.traces.recorded_trees import ThoughtTree

# Log lines that healthy hosts do not write.
TROUBLE = re.compile(
    r"Traceback|\bERROR\b|memory leak|deft: .*(fail|not agree|dropped|could not|not supported)"
)


class WorkloadError(RuntimeError):
    """A workload that lacks something to run."""


@dataclass(frozen=True)
class Served:
    """A running server, and how to measure it.

    Attributes
    ----------
    launch : Launch
    backend : str
    reference : str
        The backend whose answers are the reference.
    server : ServerProcess
    client : Client
    environment : mapping
        The server's environment variables.
    folder : Path
        Keeps answers and the files of the hosts' clients for the next servers.
    """

    launch: Launch
    backend: str
    reference: str
    server: ServerProcess
    client: Client
    environment: Mapping[str, str]
    folder: Path


class Workload(Protocol):
    """A workload to measure on every backend."""

    @property
    def seconds(self) -> float:
        """Time limit in seconds."""
        ...

    def row(self, launch: Launch, backend: str) -> Row:
        """The workload's row, without figures."""
        ...

    async def run(self, served: Served, rows: Sequence[Row]) -> Row | None:
        """Measure; returns the row, or None if there is nothing to do on this backend.

        `rows` holds the rows so far, of all backends.
        """
        ...


def answers_file(folder: Path, row: Row, backend: str, policy: str | None = None) -> Path:
    """The file that keeps a backend's answers to the row's case."""
    case = hashlib.sha256(repr(case_of(row)).encode()).hexdigest()[:12]
    return folder / f"{case}-{backend}{'' if policy is None else f'-{policy}'}.json"


@dataclass(frozen=True)
class Together:
    """A case's prompts, sent together: time per output token, and how far answers agree."""

    case: Case
    gen: int
    repeats: int
    seconds: float = 300.0
    fastest: bool = False

    def row(self, launch: Launch, backend: str) -> Row:
        case = self.case
        return make_row(
            case.workload, launch.host.name, backend, launch.model.name, launch.label,
            prefix=case.prefix, branches=case.branches, suffix=case.suffix, gen=self.gen,
            tp=launch.tensor_parallel,
        )  # fmt: skip

    async def run(self, served: Served, rows: Sequence[Row]) -> Row:
        row = self.row(served.launch, served.backend)
        room = served.launch.model.context - self.case.longest - self.gen
        await measure(
            self.case, self.gen, self.repeats, served.client, row, room=room, fastest=self.fastest
        )
        if served.launch.model.load_format != "dummy":  # attention does not change their logits
            answers = await kept_answers.ask(served.client, self.case.prompts, self.gen)
            policy = served.launch.policy_of(served.backend)
            kept_answers.keep(answers_file(served.folder, row, served.backend, policy), answers)
        return row


@dataclass(frozen=True)
class Tree:
    """A recorded tree of thoughts, replayed up to `repeats` times."""

    name: str
    tree: ThoughtTree
    repeats: int
    seconds: float = 560.0

    def row(self, launch: Launch, backend: str) -> Row:
        return make_row(
            f"tree-of-thoughts {self.name}", launch.host.name, backend, launch.model.name,
            launch.label, tp=launch.tensor_parallel,
        )  # fmt: skip

    async def run(self, served: Served, rows: Sequence[Row]) -> Row:
        row = self.row(served.launch, served.backend)
        model, client = served.launch.model, served.client
        await replay_tree(self.name, self.tree, model, client, row, self.repeats)
        return row


@dataclass(frozen=True)
class HostsOwn:
    """The host's own serving benchmark, in several runs with other prompts each time."""

    client: host_clients.HostClient
    runs: int = 1

    @property
    def seconds(self) -> float:
        return self.runs * (self.client.timeout + 10)

    def row(self, launch: Launch, backend: str) -> Row:
        name = self.client.workload
        return make_row(
            name, launch.host.name, backend, launch.model.name, launch.label,
            tp=launch.tensor_parallel,
        )  # fmt: skip

    async def run(self, served: Served, rows: Sequence[Row]) -> Row:
        row = self.row(served.launch, served.backend)
        found = []
        for seed in range(self.client.seed, self.client.seed + self.runs):
            figures = await replace(self.client, seed=seed).run(
                served.server.url, served.launch.model, _libraries(served.environment),
                served.folder / f"client-{served.backend}",
            )  # fmt: skip
            found.append(figures)
        host_clients.fill(row, found)
        return row


def _libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that importing the host's package needs; not the server's settings."""
    wanted = ("LD_LIBRARY_PATH", "SGLANG_USE_CPU_ENGINE")
    return {name: value for name, value in environment.items() if name in wanted}


@dataclass(frozen=True)
class Mixed:
    """Mixed traffic on the plugin's backend; on the reference, the check of its answers."""

    traffic: Traffic
    tolerance: float

    @property
    def seconds(self) -> float:
        return self.traffic.minutes * 60 + 900

    def row(self, launch: Launch, backend: str) -> Row:
        traffic = self.traffic
        return make_row(
            f"mixed-traffic part {traffic.part}", launch.host.name, backend, launch.model.name,
            launch.label, prefix=traffic.document_tokens, branches=traffic.workers,
            suffix=traffic.most_question_tokens, gen=traffic.most_answer_tokens,
            tp=launch.tensor_parallel,
        )  # fmt: skip

    async def run(self, served: Served, rows: Sequence[Row]) -> Row | None:
        ours = self.row(served.launch, served.launch.host.ours)
        if served.backend == ours["backend"]:
            return await self._drive(served, ours, _samples_file(served.folder, ours))
        if served.backend == served.reference:
            row, samples = _sampled(served.folder, ours, rows)
            found = await check(load_samples(samples), served.client, self.tolerance)
            return _checked(row, found.to_dict(self.tolerance) | {"against": served.backend})
        return None

    def check_plainly(self, launch: Launch, folder: Path, rows: Sequence[Row]) -> Row:
        """Check the answers against a model in plain PyTorch; no server runs meanwhile."""
        row, samples = _sampled(folder, self.row(launch, launch.host.ours), rows)
        return _checked(row, check_in_process(launch, samples, self.tolerance))

    async def _drive(self, served: Served, row: Row, samples: Path) -> Row:
        memory: list[dict[str, Any]] = []
        began = time.monotonic()
        watching = asyncio.create_task(self._watch(served.server.pid, began, memory))
        try:
            seen = await drive(
                self.traffic, served.launch.model, served.client, alive=served.server.check_alive
            )
        finally:
            watching.cancel()
        memory.append(await _sample(served.server.pid, began))
        served.server.check_alive()
        save_samples(samples, seen.samples)
        _fill_traffic(row, seen)
        log = served.server.log.read_text(errors="replace").splitlines()
        trouble = [line[:300] for line in log if TROUBLE.search(line)]
        row["detail"] |= {
            "minutes": self.traffic.minutes, "memory": memory, "memory_growth": growth(memory),
            "log_trouble": len(trouble), "first_log_trouble": trouble[:5],
            "check_with": self._check_with(served),
        }  # fmt: skip
        if seen.failures:
            row["error"] = f"{len(seen.failures)} requests failed, first: {seen.failures[0]}"
        return row

    def _check_with(self, served: Served) -> str:
        """The options of the run that checks the answers."""
        # Traffic on a server with a tokenizer, as clients need it, is another case.
        workloads = "clients,traffic" if served.launch.tokenizer else "traffic"
        return (
            f"--backends {served.reference} --workloads {workloads} "
            f"--minutes {self.traffic.minutes:g} --part {self.traffic.part}"
        )

    async def _watch(self, pid: int | None, began: float, memory: list[dict[str, Any]]) -> None:
        while True:
            memory.append(await _sample(pid, began))
            await asyncio.sleep(max(1.0, self.traffic.minutes * 60 / 30))


def _samples_file(folder: Path, ours: Row) -> Path:
    return answers_file(folder, ours, ours["backend"]).with_suffix(".samples")


def _sampled(folder: Path, ours: Row, rows: Sequence[Row]) -> tuple[Row, Path]:
    """The row of the traffic, and its samples."""
    known = [r for r in rows if case_of(r) == case_of(ours) and r["backend"] == ours["backend"]]
    samples = _samples_file(folder, ours)
    if not known or not samples.is_file():
        raise WorkloadError(
            f"no answers of {ours['backend']} to check; run {ours['workload']} with "
            f"--backends {ours['backend']} into the same --out first"
        )
    return known[-1], samples


def _checked(row: Row, result: dict[str, Any]) -> Row:
    row["detail"]["checked"] = result
    row["detail"].pop("check_with", None)
    return row


async def _sample(pid: int | None, began: float) -> dict[str, Any]:
    found = await asyncio.to_thread(memory_of, pid)
    return {"s": round(time.monotonic() - began, 1), **found}


def _fill_traffic(row: Row, seen: Seen) -> None:
    row["tokens_per_s"] = round(seen.tokens / seen.seconds, 2) if seen.seconds else None
    row["detail"]["traffic"] = seen.to_dict()

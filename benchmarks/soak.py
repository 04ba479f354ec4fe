"""``python -m benchmarks soak``: mixed traffic for a long time, in parts that add up in one file.

Workers send one request after another: a question about one of many documents, or an unshared
prompt. The documents exceed the KV cache, so requests join, hang up and evict each other. The
host's own backend then computes a sample of the answers again, and memory must stay level.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.e2e.answers import Sample, check, tolerance_of
from benchmarks.e2e.command import (
    ERRORS,
    HostArguments,
    ModelChoice,
    ShapeOption,
    StartOption,
    TogetherOption,
    served_model,
    typed_command,
)
from benchmarks.e2e.launch import HOSTS, Launch, checked_backends, same_prefill
from benchmarks.e2e.run import LOST, Side, client_of, start
from benchmarks.e2e.workloads import Ids, draw
from benchmarks.row_files import RowsError, make_folder, read_rows, write_rows
from deft_backend.cli.errors import host_arguments, reported, say, unwound
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.files.provenance import provenance
from deft_backend.tools.harness.answers import NotAnswered
from deft_backend.tools.harness.client import ServerClient
from deft_backend.tools.servers.command import value_of

LEVEL_MIB, LEVEL_SHARE = 64.0, 0.03
"""Memory is level if it grows by less than this after the first fifth: MiB, or share of it."""

CHECKED = ("checked_answers", "checked_tokens", "ties", "wrong")
COUNTS = ("finished", "aborted", "failures", "log_trouble", *CHECKED)

# Log lines that healthy hosts do not write.
TROUBLE = re.compile(
    r"Traceback|\bERROR\b|memory leak|deft: .*(fail|not agree|dropped|could not|not supported)"
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Traffic:
    """The traffic to send.

    - `seconds`: while workers start requests; `part`: another number sends other requests.
    - `turnover`: share of requests after which a new document replaces an old one.
    - `unshared`, `aborted`: shares of requests that share nothing, and whose client hangs up early.
    - `most_question`, `most_answer`: largest lengths in tokens; lengths are uniform from 1
      (answers: 2).
    - `samples`: answers to keep for the check.
    """

    seconds: float
    part: int
    workers: int = 64
    documents: int = 48
    document_tokens: int = 16384
    turnover: float = 0.01
    unshared: float = 0.2
    aborted: float = 0.1
    most_question: int = 1024  # so that prompts and decode rows fill graphs of all sizes
    most_answer: int = 256
    samples: int = 200


ON_CPU = {"workers": 6, "documents": 24, "document_tokens": 1024, "samples": 60}
ON_CPU |= {"most_question": 32, "most_answer": 16}


@dataclass
class Seen:
    """What the traffic came to. `evicted`: questions about an earlier document of which the host's
    cache held less than half; None if the host does not report cached tokens."""

    finished: int = 0
    aborted: int = 0
    failures: list[str] = field(default_factory=list)
    evicted: int | None = None
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)


async def drive(traffic: Traffic, vocabulary: int, client: ServerClient, server: Any) -> Seen:
    """Send traffic for its seconds, then wait for the requests in flight.

    Raises StartError if the server has ended.
    """
    chance = random.Random(f"traffic {traffic.part}")
    documents = [
        draw(chance, vocabulary, traffic.document_tokens) for _ in range(traffic.documents)
    ]
    asked: dict[Ids, int] = {}
    seen = Seen()
    begin = time.monotonic()

    async def work() -> None:
        while time.monotonic() < begin + traffic.seconds and len(seen.failures) < 100:
            await _one(traffic, vocabulary, documents, asked, chance, client, seen)
            if seen.failures:
                server.check_alive()

    async def watch() -> None:
        while True:
            found = await asyncio.to_thread(memory_of, server.pid)
            seen.memory.append({"s": round(time.monotonic() - begin, 1), **found})
            await asyncio.sleep(max(1.0, traffic.seconds / 30))

    workers = [asyncio.create_task(work()) for _ in range(traffic.workers)]
    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*workers)
    finally:
        for task in (watching, *workers):
            task.cancel()
        await asyncio.gather(watching, *workers, return_exceptions=True)
    seen.seconds = time.monotonic() - begin
    server.check_alive()
    return seen


async def _one(
    traffic: Traffic,
    vocabulary: int,
    documents: list[Ids],
    asked: dict[Ids, int],
    chance: random.Random,
    client: ServerClient,
    seen: Seen,
) -> None:
    """Choose one request, send it, and count its answer."""
    question = draw(chance, vocabulary, chance.randint(1, traffic.most_question))
    tokens = chance.randint(2, traffic.most_answer)
    leave_after = chance.randint(1, tokens - 1) if chance.random() < traffic.aborted else None
    # By Zipf's law: a batch shares the first documents, and the host evicts the others.
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    document = () if chance.random() < traffic.unshared else chance.choices(documents, weights)[0]
    if chance.random() < traffic.turnover:
        place = chance.randrange(len(documents))
        documents[place] = draw(chance, vocabulary, traffic.document_tokens)
    prompt = document + question
    try:
        answer, _ = await client.ask(prompt, tokens, leave_after=leave_after)
    except NotAnswered as error:
        seen.failures.append(f"{len(prompt)} + {tokens} tokens: {error}"[:300])
        await asyncio.sleep(0.1)  # do not flood a server that refuses everything
        return
    if leave_after is not None:
        seen.aborted += 1
        return
    if document:
        if asked.get(document) and answer.cached is not None:
            seen.evicted = (seen.evicted or 0) + (answer.cached < traffic.document_tokens // 2)
        asked[document] = asked.get(document, 0) + 1
    seen.finished += 1
    # Each finished answer is kept with equal probability (reservoir sampling).
    place = len(seen.samples)
    if place >= traffic.samples:
        place = chance.randrange(seen.finished)
    if place < traffic.samples:
        seen.samples[place : place + 1] = [(prompt, answer.ids)]


def memory_of(pid: int | None) -> dict[str, float | None]:
    """Resident MiB of a process and its descendants, and used MiB of all GPUs, by all processes.
    None if this machine does not report it.
    """
    import psutil

    try:
        processes = [root := psutil.Process(pid), *root.children(recursive=True)]
        total = sum(process.memory_info().rss for process in processes)
    except psutil.Error:  # one has just ended
        total = 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        gpus: float | None = float(sum(map(int, said.split())))
    except (OSError, subprocess.SubprocessError, ValueError):
        gpus = None
    return {"rss_mib": round(total / 2**20, 1) or None, "gpu_mib": gpus}


def level(samples: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    """Memory in the second fifth of the time and in the last, in MiB; None if unknown. The server's
    own memory is the largest of a fifth. The GPUs' memory is the smallest, because its
    samples count other processes too, and these only add to it.
    """
    known = [sample for sample in samples if sample.get(name) is not None]
    if len(known) < 2:
        return None
    fifth = known[-1]["s"] / 5
    choose = min if name == "gpu_mib" else max
    rest = [sample for sample in known if sample["s"] >= fifth]
    second = [sample[name] for sample in rest if sample["s"] < 2 * fifth] or [rest[0][name]]
    last = [sample[name] for sample in rest if sample["s"] >= 4 * fifth]
    begin, end = choose(second), choose(last)
    return {"after_first_fifth": begin, "end": end, "growth": round(end - begin, 1)}


def is_level(memory: dict[str, float] | None) -> bool:
    """Whether memory stayed where it was after the first fifth."""
    if memory is None:
        return True
    return memory["growth"] <= max(LEVEL_MIB, LEVEL_SHARE * memory["after_first_fifth"])


def totals(parts: Sequence[Row]) -> dict[str, Any]:
    """Sums over parts, and whether all is well."""
    sums: dict[str, Any] = {name: sum(row[name] for row in parts) for name in COUNTS}
    sums["seconds"] = round(sum(row["seconds"] for row in parts), 1)
    sums["level"] = all(is_level(found) for row in parts for found in row["memory"].values())
    bad = any(row[name] for row in parts for name in ("error", "failures", "wrong", "log_trouble"))
    sums["ok"] = bool(sums["level"] and sums["checked_tokens"] and not bad)
    return sums


def run_part(
    launch: Launch, reference: str, traffic: Traffic, logs: Path, console: Console, together: bool
) -> Row:
    """Traffic on a server with the plugin, then its check on the host's own backend."""
    row: Row = {"part": traffic.part, "host": launch.host.name, "model": launch.model.name}
    row |= {"error": None, "seconds": 0.0, "evicted": None, **dict.fromkeys(COUNTS, 0)}
    row["memory"] = {"rss_mib": None, "gpu_mib": None}
    dtype = "bfloat16" if launch.host.on_gpu() else "float32"
    tolerance = tolerance_of(dtype, value_of("--kv-cache-dtype", launch.options))
    vocabulary, said = launch.model.ids, partial(say, console)

    async def asked(server: Any, asks: Callable[[ServerClient], Awaitable[Any]]) -> Any:
        async with client_of(server.url) as client:
            return await asks(client)

    ours, theirs = Side(launch, launch.host.ours), Side(launch, reference)
    try:
        with ExitStack() as opened:
            sides = [theirs, ours] if together else [ours]
            start(sides, logs, said, opened)
            server = [side.running() for side in sides][-1]  # ours, if both have started
            seen = asyncio.run(asked(server, partial(drive, traffic, vocabulary, server=server)))
            log = server.log.read_text(errors="replace").splitlines()
            row |= {"seconds": round(seen.seconds, 1), "finished": seen.finished}
            row |= {"aborted": seen.aborted, "evicted": seen.evicted}
            row["failures"], row["first_failures"] = len(seen.failures), seen.failures[:5]
            row["log_trouble"] = sum(bool(TROUBLE.search(line)) for line in log)
            row["memory"] = {name: level(seen.memory, name) for name in row["memory"]}
            if not together:
                opened.close()
                start([theirs], logs, said, opened)
            checks = partial(check, seen.samples, tolerance=tolerance)
            found = asyncio.run(asked(theirs.running(), checks)).to_dict(tolerance)
        row |= {name: found[name.removeprefix("checked_")] for name in CHECKED}
        row["first_wrong"] = found["first_wrong"]
    except (*LOST, NotAnswered) as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    return row


def soak(
    out: Annotated[Path, typer.Option(help="JSON file; a later run adds a part to it.")],
    host_args: HostArguments = None,
    host: HostOption = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds of this part's traffic.")] = 1200,
    shape: ShapeOption = None,
    reference: Annotated[
        str | None, typer.Option(help="Backend that checks the answers; default: the host's own.")
    ] = None,
    start_timeout: StartOption = 500.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight; default: 64, on the CPU 6.")
    ] = None,
    together: TogetherOption = False,
) -> None:
    """Send mixed traffic to a server with the plugin, and check a sample of its answers.

    Exits with 1 if an answer is wrong, a request failed, the server logged trouble, or memory still
    grows after the first fifth of a part.
    """
    console = Console()
    chosen = HOSTS[chosen_host(host, needed=True)]
    with reported(*ERRORS), ExitStack() as opened:
        make_folder(out)
        parts, header = _before(out)
        checks = reference or chosen.reference()
        checked_backends(chosen, (chosen.ours, checks))
        model = opened.enter_context(served_model(chosen, ModelChoice(shape=shape)))
        launch = Launch(
            chosen, model, tuple(host_arguments(host_args)), start_seconds=start_timeout
        )
        launch = replace(launch, environment=same_prefill(chosen, checks))
        part = max((row["part"] for row in parts), default=0) + 1
        traffic = Traffic(seconds, part, **({} if chosen.on_gpu() else ON_CPU))
        traffic = replace(traffic, workers=workers or traffic.workers)
        with unwound(console, "all servers have ended; this part is not recorded"):
            logs = out.with_suffix(".logs")
            parts.append(run_part(launch, checks, traffic, logs, console, together))
        runs = [*header.get("runs", []), {**provenance(), "command": typed_command(), "part": part}]
        total = totals(parts)
        write_rows(out, parts, {"runs": runs, "total": total})
    say(console, f"{parts[-1]}\n{total}")
    raise typer.Exit(not total["ok"])


def _before(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The parts of earlier runs."""
    if not path.exists():
        return [], {}
    rows, header = read_rows(path, ("part", "checked_tokens"), "python -m benchmarks soak")
    if not isinstance(header.get("runs"), list):
        raise RowsError(f"{path} holds no soak")
    return list(rows), header

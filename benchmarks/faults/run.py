"""Start servers, inject one fault after another, and record what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.reference import Ids, Reference, draw_prompts
from benchmarks.faults.tested_server import Judged, TestedServer, start
from deft_backend.telemetry.counters import Place, StateName

TOKENS = 12
LONG_TOKENS = 100
"""Tokens of an answer that a signal must cut off."""

END_SECONDS = 90.0
"""Longest time in which a server ends after its last answer."""

INSIDE_FAULTS = ("poison", "planner", "clock")
LOAD_FAULTS = ("aborts", "flush", "pause", "weights")

Row = dict[str, Any]
Say = Callable[[str], None]


class Harness:
    """All faults of one host, over three servers.

    Parameters
    ----------
    host : str
    folder : Path
        For logs and cache folders.
    model : Path
    seed : int
        Of prompts and of combinations.
    combinations : int
    say : callable
        Gets a line for each fault.
    """

    def __init__(
        self, host: str, folder: Path, model: Path, seed: int, combinations: int, say: Say
    ) -> None:
        self.host = host
        self.rows: list[Row] = []
        self._folder = folder
        self._model = model
        self._reference = Reference(model)
        self._random = random.Random(seed)
        self._combinations = combinations
        self._say = say

    def run(self, chosen: set[str] | None = None) -> list[Row]:
        """Inject every fault, or only the `chosen` ones."""

        def wanted(name: str) -> bool:
            return chosen is None or name in chosen

        shared = self._folder / "cache"
        with self._server("first", (), shared, spoilt=wanted("files")) as first:
            # vLLM gives tree attention up at a failed plan, SGLang only at a failed kernel.
            sglang = self.host == "sglang"
            last = "launch" if sglang else "planner"
            for name in (*INSIDE_FAULTS, *LOAD_FAULTS):
                if wanted(name) and self._has(name) and name != last:
                    self._record(name, first, self._one(first, name))
            for _ in range(self._combinations if wanted("combined") else 0):
                names = self._random.sample(
                    [name for name in ("poison", "clock", *LOAD_FAULTS) if self._has(name)], 3
                )
                self._record("combined", first, self._several(first, names), of=names)
            # After a full disk the server writes no state for a minute, so nothing reads the clock.
            if wanted("full-disk"):
                self._record("full-disk", first, self._one(first, "full-disk"))
            if wanted(last):
                self._record(last, first, self._one(first, last))
            if wanted("launch") and not sglang:
                with self._server("another", (), shared) as another:
                    self._record("launch", another, self._one(another, "launch"))
            if wanted("no-memory") or wanted("shared-folders") or wanted("sigterm"):
                with self._server("second", ("no-memory",), shared) as second:
                    if wanted("no-memory"):
                        self._record("no-memory", second, self._plain(second, "no-memory"))
                    if wanted("shared-folders"):
                        self._record("shared-folders", first, self._both(first, second))
                    if wanted("sigterm"):
                        self._end("sigterm", second)
            if wanted("sigkill"):
                self._end("sigkill", first)
        return self.rows

    def _has(self, name: str) -> bool:
        return name != "weights" or self.host == "sglang"

    @contextmanager
    def _server(
        self, name: str, armed: tuple[str, ...], shared: Path, *, spoilt: bool = False
    ) -> Iterator[TestedServer]:
        began = time.monotonic()
        server = start(
            self.host, self._folder / name, self._model, self._reference, armed, shared=shared,
            before=(lambda port: spoil(shared, port)) if spoilt else None,
        )  # fmt: skip
        self._say(f"{self.host}: a server is up after {time.monotonic() - began:.0f} s")
        try:
            if spoilt:
                self._record("files", server, self._files(server, shared))
            yield server
        finally:
            server.process.stop()

    def _prompts(self, count: int = 6) -> list[Ids]:
        return draw_prompts(self._random.randrange(1 << 30), count, 96, 24)

    def _record(
        self, name: str, server: TestedServer, work: Coroutine[Any, Any, Row], **more: Any
    ) -> None:
        began = time.monotonic()
        row = {"fault": name, "host": self.host, **more, **asyncio.run(work)}
        row["seconds"] = round(time.monotonic() - began, 1)
        found = server.new_log_lines("deft: .*(fail|cannot|planted|could not)")
        lines = [line[line.index("deft: ") :][:200] for line in found]
        # A record names no path of the machine.
        lines = [line.replace(f"{self._folder}/", "") for line in lines]
        row["log"] = lines[:6]
        row["ok"] = is_ok(row)
        self.rows.append(row)
        self._say(f"{self.host}: {name}: {json.dumps(row)}")

    async def _plain(self, server: TestedServer, name: str) -> Row:
        judged = await server.judged(self._prompts(), TOKENS)
        return {"injected": max(1, server.disarm(name)), **judged.to_dict()}

    async def _files(self, server: TestedServer, shared: Path) -> Row:
        row = await self._plain(server, "files")
        return {**row, "link_followed": not still_there(shared)}

    async def _both(self, first: TestedServer, second: TestedServer) -> Row:
        answers = await asyncio.gather(
            first.judged(self._prompts(3), TOKENS), second.judged(self._prompts(3), TOKENS)
        )
        total = Judged()
        for judged in answers:
            total.right += judged.right
            total.wrong += judged.wrong
            total.lost += judged.lost
            total.cut += judged.cut
            total.errors += judged.errors
        return {"injected": 2, **total.to_dict()}

    async def _one(self, server: TestedServer, name: str) -> Row:
        return await self._several(server, [name])

    async def _several(self, server: TestedServer, names: list[str]) -> Row:
        """Faults at once, and the answers after them."""
        injected: dict[str, int] = {}

        async def under_load() -> None:
            for name in names:
                if name in LOAD_FAULTS:
                    injected[name] = await self._under_load(server, name)

        inside = [name for name in names if name not in LOAD_FAULTS]
        for name in inside:
            server.arm(name)
        judged = await server.judged(self._prompts(), TOKENS, under_load)
        for name in inside:
            injected[name] = server.disarm(name)
        after = await server.judged(self._prompts(3), TOKENS)
        return {
            "injected": injected if len(names) > 1 else injected[names[0]], **judged.to_dict(),
            "after": after.to_dict(),
        }  # fmt: skip

    async def _under_load(self, server: TestedServer, name: str) -> int:
        """Inject a fault from outside; returns how often the server took it."""
        if name == "aborts":
            await server.hang_up(self._prompts(12))
            return 12
        sglang = self.host == "sglang"
        if name == "flush":
            path = "/flush_cache" if sglang else "/reset_prefix_cache"
            # SGLang refuses while requests run; asking is part of the fault.
            return sum([await server.post(path) in (200, 400) for _ in range(3)])
        if name == "weights":
            body = json.dumps({"model_path": str(self._model)}).encode()
            return int(await server.post("/update_weights_from_disk", body) == 200)
        if sglang:
            paused = await server.post("/pause_generation", b'{"mode": "retract"}')
            await asyncio.sleep(2)
            return int(paused == 200 and await server.post("/continue_generation") == 200)
        paused = await server.post("/pause?mode=keep")
        await asyncio.sleep(2)
        return int(paused == 200 and await server.post("/resume") == 200)

    def _end(self, name: str, server: TestedServer) -> None:
        """SIGTERM to the server, or SIGKILL to the process that decodes, under load."""
        family = server.family()
        victim = family[0] if name == "sigterm" else server.decoding_process()
        struck: list[float] = []

        async def strike() -> None:
            await server.all_arrive()
            struck.append(time.monotonic())
            victim.send_signal(signal.SIGTERM if name == "sigterm" else signal.SIGKILL)

        async def work() -> Row:
            judged = await server.judged(self._prompts(), LONG_TOKENS, strike)
            # A host may answer all requests before it ends.
            await asyncio.to_thread(psutil.wait_procs, family, END_SECONDS)
            left = [process for process in family if _lives(process)]
            return {
                "injected": 1, **judged.to_dict(), "processes_left": len(left),
                "ended_after": round(time.monotonic() - struck[0], 1),
            }  # fmt: skip

        self._record(name, server, work())


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def is_ok(row: Row) -> bool:
    """Whether a fault came to what the page promises: no wrong token, none lost, none left."""
    ends = row["fault"] in ("sigterm", "sigkill")
    counts = [row, *([row["after"]] if "after" in row else [])]
    injected = row["injected"]
    happened = all(injected.values()) if isinstance(injected, dict) else injected > 0
    return bool(
        happened
        and all(count["wrong"] == 0 for count in counts)
        and (ends or all(count["lost"] == count["cut"] == 0 for count in counts))
        and row.get("processes_left", 0) == 0
        and not row.get("link_followed", False)
    )


def spoil(cache: Path, port: int) -> list[str]:
    """Fill a cache folder with files that a server may read or replace; returns what is wrong."""
    servers, tables, kernels = (cache / name for name in ("servers", "tables", "kernels"))
    for folder in (servers, tables, kernels):
        folder.mkdir(parents=True)
    elsewhere = cache / "elsewhere.json"
    elsewhere.write_text("not yours")
    for rank in range(2):
        name = StateName(port, rank, None, None, Place.here(), os.getpid())
        (servers / name.file_name).symlink_to(elsewhere)
    for number, text in enumerate(("", "{", '{"format": 99}', "\x00\xff", "[" * 50_000)):
        (tables / f"gpu-{number}.json").write_text(text, encoding="latin-1")
    manifest = {"format": 1, "package": "0.0.1", "kernels": {"../..": {"x.json": "0"}}}
    (kernels / "manifest.json").write_text(json.dumps(manifest)[:-9])
    (kernels / "manifest.json").chmod(0o666)
    return [
        "a state file is a link", "five cost tables are damaged",
        "the kernel folder is damaged and writable for others",
    ]  # fmt: skip


def still_there(cache: Path) -> bool:
    """Whether the file behind the link is as it was."""
    return (cache / "elsewhere.json").read_text() == "not yours"

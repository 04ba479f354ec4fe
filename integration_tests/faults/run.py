"""Start servers, inject one fault after another, and record what came of each."""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from functools import partial

import psutil

from deft_backend.telemetry.counters import Place, StateName
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL, ask_to
from integration_tests.faults.tested_server import draw_prompts, under_test
from integration_tests.hosts import HOST

TOKENS = 12
LONG_TOKENS = 100
"""Tokens of an answer that a signal must cut off."""

END_SECONDS = 90.0
"""Longest time in which a server ends after its last answer."""

COMBINATIONS = 4
LOAD_FAULTS = ("aborts", "flush", "pause", "weights")
LINKED, CONTENT = "elsewhere.json", "not yours"


class Harness:
    """All faults of the installed host, over three servers.

    - `folder`: for logs and cache folders.
    - `seed`: of prompts, and of random triples of faults.
    """

    def __init__(self, folder, seed):
        self.rows = []
        self._folder = folder
        self._reference = PlainModel(MODEL)
        self._random = random.Random(seed)

    def run(self, chosen=None):
        """Inject every fault, or only the `chosen` ones."""

        def wanted(name):
            return chosen is None or name in chosen

        with self._server("first", spoilt=wanted("files")) as first:
            no_weights = {"weights"} if HOST == "vllm" else set()
            faults = [name for name in ("poison", "clock", *LOAD_FAULTS) if name not in no_weights]
            for name in faults:
                if wanted(name):
                    self._record(name, first, self._several(first, [name]))
            for _ in range(COMBINATIONS if wanted("combined") else 0):
                names = self._random.sample(faults, 3)
                self._record("combined", first, self._several(first, names), of=names)
            # After a full disk the server writes no state for a minute, so nothing reads the clock.
            # After a failed plan, or a failed kernel, it uses tree attention no more.
            for name in ("full-disk", "planner"):
                if wanted(name):
                    self._record(name, first, self._several(first, [name]))
            if wanted("launch"):
                with self._server("another") as another:
                    self._record("launch", another, self._several(another, ["launch"]))
            if wanted("no-memory") or wanted("shared-folders") or wanted("sigterm"):
                with self._server("second", armed=("no-memory",)) as second:
                    if wanted("no-memory"):
                        self._record("no-memory", second, self._plain(second, "no-memory"))
                    if wanted("shared-folders"):
                        self._record("shared-folders", first, self._both(first, second))
                    if wanted("sigterm"):
                        self._end("sigterm", second)
            if wanted("sigkill"):
                self._end("sigkill", first)
        return self.rows

    @contextlib.contextmanager
    def _server(self, name, armed=(), *, spoilt=False):
        began, shared = time.monotonic(), self._folder / "cache"
        before = partial(spoil, shared) if spoilt else None
        with under_test(self._folder / name, self._reference, armed, shared, before) as server:
            print(f"{HOST}: a server is up after {time.monotonic() - began:.0f} s")
            if spoilt:
                self._record("files", server, self._plain(server, "files"))
                followed = (shared / LINKED).read_text() != CONTENT
                self.rows[-1]["link_followed"] = followed
                self.rows[-1]["ok"] &= not followed
            yield server

    def _prompts(self, count=6):
        return draw_prompts(self._random.randrange(1 << 30), count, 96, 24)

    def _record(self, name, server, work, **more):
        began = time.monotonic()
        row = {"fault": name, "host": HOST, **more, **asyncio.run(work)}
        row["seconds"] = round(time.monotonic() - began, 1)
        found = server.new_log_lines("deft: .*(fail|cannot|planted|could not)")
        lines = [line[line.index("deft: ") :][:200] for line in found]
        # A record names no path of the machine.
        row["log"] = [line.replace(f"{self._folder}/", "") for line in lines[:6]]
        row["ok"] = is_ok(row)
        self.rows.append(row)
        print(f"{HOST}: {name}: {json.dumps(row)}")

    async def _plain(self, server, name):
        judged = await server.judged(self._prompts(), TOKENS)
        return {"injected": max(1, server.disarm(name)), **judged}

    async def _both(self, first, second):
        ours, theirs = await asyncio.gather(
            *(server.judged(self._prompts(3), TOKENS) for server in (first, second))
        )
        return {"injected": 2, **ours, "after": theirs}

    async def _several(self, server, names):
        """Faults at once, and the answers after them."""
        injected = {}

        async def under_load():
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
        count = injected if len(names) > 1 else injected[names[0]]
        return {"injected": count, **judged, "after": after}

    async def _under_load(self, server, name):
        """Inject a fault from outside; returns how often the server took it."""
        if name == "aborts":
            await server.hang_up(self._prompts(12))
            return 12
        if name == "flush":  # SGLang refuses while requests run; asking is part of the fault
            for _ in range(3):
                await asyncio.to_thread(server.flush)
            return 3
        if name == "weights":
            body = {"model_path": str(MODEL)}
            return int(
                await asyncio.to_thread(ask_to, server, "update_weights_from_disk", body) == 200
            )
        await asyncio.to_thread(server.pause, server.PAUSES[-1])
        await asyncio.sleep(2)
        await asyncio.to_thread(server.resume)
        return 1

    def _end(self, name, server):
        """SIGTERM to the server, or SIGKILL to the process that decodes, under load."""
        family = server.family()
        victim = family[0] if name == "sigterm" else server.decoding_process()
        struck = []

        async def strike():
            await server.all_arrive()
            struck.append(time.monotonic())
            victim.send_signal(signal.SIGTERM if name == "sigterm" else signal.SIGKILL)

        async def work():
            judged = await server.judged(self._prompts(), LONG_TOKENS, strike)
            # A host may answer all requests before it ends.
            await asyncio.to_thread(psutil.wait_procs, family, END_SECONDS)
            left = sum(map(_lives, family))
            after = round(time.monotonic() - struck[0], 1)
            ended = {"processes_left": left, "ended_after": after}
            return {"injected": 1, **judged, **ended}

        self._record(name, server, work())


def _lives(process):
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_ok(row):
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


def spoil(cache, port):
    """Fill a cache folder with files that a server may read or replace."""
    servers, tables, kernels = (cache / name for name in ("servers", "tables", "kernels"))
    for folder in (servers, tables, kernels):
        folder.mkdir(parents=True)
    (cache / LINKED).write_text(CONTENT)
    for rank in range(2):
        name = StateName(port, rank, None, None, Place.here(), os.getpid())
        (servers / name.file_name).symlink_to(cache / LINKED)
    for number, text in enumerate(("", "{", '{"format": 99}', "\x00\xff", "[" * 50_000)):
        (tables / f"gpu-{number}.json").write_text(text, encoding="latin-1")
    manifest = {"format": 1, "package": "0.0.1", "kernels": {"../..": {"x.json": "0"}}}
    (kernels / "manifest.json").write_text(json.dumps(manifest)[:-9])
    (kernels / "manifest.json").chmod(0o666)

"""A prefill and a decode server, which are one server to the clients of a router."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

from deft_backend.tools.servers.command import LOOPBACK, ServerCommand, StartError, free_port
from deft_backend.tools.servers.process import ServerProcess

Progress = Callable[[float], None]
"""Is called while a server starts; what it raises ends the start."""


Commands = tuple[ServerCommand, ServerCommand, ServerCommand]
"""Of a decode server, a prefill server, and the router that clients ask."""


def sglang_pair(command: ServerCommand, ranks: int = 1) -> Commands:
    """Two servers like `command` that transfer KV by NIXL, and ``sglang-router``.

    Both see the same GPUs: the prefill server runs on the first `ranks` of them, the decode server
    on the next ones.
    """
    bootstrap, port, place = free_port(), free_port(), free_port()
    shared = [*command.arguments, "--disaggregation-transfer-backend", "nixl"]
    shared += ["--disaggregation-mode"]
    cached = ["decode", "--disaggregation-decode-enable-radix-cache"]
    cached += ["--base-gpu-id", str(ranks)] if command.on_gpu else []
    alone = ["prefill", "--disaggregation-bootstrap-port", str(bootstrap), "--port", str(port)]
    prefill = replace(command, arguments=(*shared, *alone), port=port)
    router = [sys.executable, "-m", "sglang_router.launch_router", "--mini-lb"]
    router += ["--pd-disaggregation", "--prefill", prefill.url, str(bootstrap)]
    router += ["--decode", command.url, "--host", LOOPBACK, "--port", str(place)]
    decode = replace(command, arguments=(*shared, *cached))
    return decode, prefill, replace(command, arguments=tuple(router), port=place)


class ServerPair:
    """A :class:`ServerProcess` of two servers and a router; `command` and `log` are the decode
    server's."""

    def __init__(
        self,
        commands: Commands,
        log: Path,
        *,
        timeout: float = 600.0,
        progress: Progress = lambda seconds: None,
    ) -> None:
        self.command = commands[0]
        self.log = log
        names = (f"{log.stem}{name}.log" for name in ("", "-prefill", "-router"))
        self._parts = dict(zip(map(log.with_name, names), commands, strict=True))
        self._timeout = timeout
        self._progress = progress
        self._servers: list[ServerProcess] = []
        self._opened = ExitStack()

    @property
    def url(self) -> str:
        return list(self._parts.values())[-1].url

    def __enter__(self) -> ServerPair:
        def start(log: Path, progress: Progress) -> None:
            command = self._parts[log]
            server = ServerProcess(command, log, timeout=self._timeout, progress=progress)
            self._servers.append(self._opened.enter_context(server))

        try:
            at_once([partial(start, log) for log in self._parts], self._progress)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_alive(self) -> None:
        for server in self._servers:
            server.check_alive()

    def stop(self) -> None:
        self._opened.close()


def at_once(
    starts: Sequence[Callable[[Progress], None]], progress: Progress = lambda seconds: None
) -> None:
    """Call functions that start servers at the same time; an error of one ends the others."""
    if len(starts) == 1:
        starts[0](progress)  # in this thread, where signals can wait
        return
    interrupted = Event()

    def wait(seconds: float) -> None:
        progress(seconds)
        if interrupted.is_set():
            raise StartError("the start was interrupted")

    with ThreadPoolExecutor(len(starts)) as threads:
        try:
            for ended in as_completed([threads.submit(start, wait) for start in starts]):
                ended.result()
        except BaseException:
            interrupted.set()  # or the threads would wait for their servers
            raise

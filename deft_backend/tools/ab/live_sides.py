"""The two sides of a comparison over time: servers that run already, or servers of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from deft_backend.tools.ab.live_run import Live, Side
from deft_backend.tools.harness.counted_server import CountedServer
from deft_backend.tools.harness.live_counters import LiveCounters
from deft_backend.tools.servers.command import BACKEND, ServerCommand, free_port, server_command


class StartWatcher(Protocol):
    """Receives the start of servers."""

    def starting(self, side: str, command: ServerCommand) -> Callable[[float], None]:
        """As of :class:`deft_backend.tools.ab.comparison.Watcher`."""
        ...

    def started(self, side: str) -> None:
        """The server answers."""
        ...


class RunningServer:
    """A server that somebody else started."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def counters(self) -> LiveCounters:
        return LiveCounters(self.url, self._folder)


def running_sides(urls: Sequence[str], folder: Path) -> tuple[Side, Side]:
    """Two servers that run, called A and B; `folder` holds state files of this machine."""

    @contextmanager
    def opened(url: str) -> Iterator[Live]:
        yield RunningServer(url, folder)

    first, second = urls
    return (
        Side("A", f"A: {first}", partial(opened, first)),
        Side("B", f"B: {second}", partial(opened, second)),
    )


def started_sides(
    model: str, host: str, logs: Path, watcher: StartWatcher, *, policy: str | None,
    baseline: str | None, host_arguments: Sequence[str],
) -> tuple[Side, Side]:  # fmt: skip
    """The host with its own backend, and with the plugin; each runs while it is measured."""

    def command(side: str, state_folder: Path) -> ServerCommand:
        observe: Mapping[str, str] = {"DEFT_OBSERVE": "1"} if side == "host" else {}
        return server_command(
            model, free_port(), host=host, backend=baseline if side == "host" else BACKEND,
            policy=policy if side == "deft" else None, host_arguments=host_arguments,
            environment={"DEFT_STATE_DIR": str(state_folder), **observe},
        )  # fmt: skip

    @contextmanager
    def opened(side: str) -> Iterator[Live]:
        with CountedServer(
            partial(command, side), logs / f"{side}.log", on_start=partial(watcher.starting, side)
        ) as server:
            watcher.started(side)
            server.counts()
            yield RunningServer(server.url, server.state_folder)

    return (
        Side("host", "", partial(opened, "host")),
        Side("deft", "", partial(opened, "deft")),
    )

"""The two servers of a comparison: running servers, or servers that the command starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

from deft_backend.tools.harness.server_counters import ServerCounters
from deft_backend.tools.harness.workload import Workload
from deft_backend.tools.servers.command import (
    BACKEND,
    BACKEND_NAMES,
    ServerCommand,
    free_port,
    server_command,
)
from deft_backend.tools.servers.process import ServerProcess

_REFUSED = re.compile("deft: .*(all attention|these layers) runs? through ")


class AbError(RuntimeError):
    """The comparison could not be made."""


@dataclass(frozen=True)
class RunningServer:
    """A server under measurement; the later fields describe one that the command started."""

    url: str
    folder: Path  # State files of servers on this machine
    command: str = ""  # as typed in a shell
    log: Path | None = None
    # Raises StartError, with the end of the log, if the server has ended.
    check_alive: Callable[[], None] = lambda: None
    # The plugin's name as an attention backend, if this server was started with it.
    plugin: str = ""

    def counters(self) -> ServerCounters:
        return ServerCounters(self.url, self.folder, wait_seconds=1.0 if self.log is None else 5.0)

    def check_counted(self) -> None:
        counted = self.counters().read() if self.plugin else None
        if self.log is None or not self.plugin or (counted and counted.decode_steps):
            return
        line = refusal(self.log.read_text(errors="replace"))
        why = f"its log says {line!r}" if line else "the plugin counted no step; run 'deft doctor'"
        raise AbError(
            f"the server was started with --attention-backend {self.plugin}, but {why}. The log "
            f"is {self.log}"
        )


Sides = Mapping[str, Callable[[], AbstractContextManager[RunningServer]]]
"""The two servers by their names in the report; each runs while its context manager is open."""


def running_sides(urls: tuple[str, str], folder: Path, progress: Progress) -> Sides:
    """Two running servers, called A and B; `folder` holds state files of this machine."""

    @contextmanager
    def opened(name: str, url: str) -> Iterator[RunningServer]:
        progress.announce(f"{name}: {url}")
        yield RunningServer(url, folder)

    return {name: partial(opened, name, url) for name, url in zip("AB", urls, strict=True)}


def started_sides(
    model: str,
    host: str,
    logs: Path,
    folder: Path,
    progress: Progress,
    *,
    baseline: str | None,
    host_arguments: Sequence[str],
) -> Sides:
    """The host with its own backend, and with the plugin; each runs while it is measured."""

    @contextmanager
    def opened(side: str) -> Iterator[RunningServer]:
        ours, log = side == "deft", logs / f"{side}.log"
        command = server_command(
            model,
            free_port(),
            host=host,
            backend=BACKEND if ours else baseline,
            host_arguments=host_arguments,
        )
        answers = progress.starting(side, command)
        with ServerProcess(command, log) as server:
            answers()
            plugin, typed = BACKEND_NAMES[host] if ours else "", command.shell()
            yield RunningServer(server.url, folder, typed, log, server.check_alive, plugin)

    return {side: partial(opened, side) for side in ("host", "deft")}


def refusal(log: str) -> str | None:
    """The line in which the plugin leaves a server to its host's own backend; None: no line."""
    lines = [line[line.index("deft: ") :] for line in log.splitlines() if _REFUSED.search(line)]
    return lines[-1] if lines else None


_TITLES = {"host": "host's own backend", "deft": "tree attention"}


class Progress(bars.Progress):
    def __init__(self, console: Console) -> None:
        super().__init__(
            bars.SpinnerColumn(finished_text="[green]✓[/green]"),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=28),
            bars.MofNCompleteColumn(),
            bars.TextColumn("[dim]{task.fields[unit]}[/dim]"),
            bars.TimeElapsedColumn(),
            console=console,
        )
        self._noted: set[str] = set()

    def starting(self, side: str, command: ServerCommand) -> Callable[[], None]:
        for note in command.notes:
            if note not in self._noted:
                self._noted.add(note)
                self.print(f"[dim]• {note}[/dim]", highlight=False)
        self.print(f"[bold]{side}[/bold]: {_TITLES[side]}", highlight=False)
        task = self.add_task("starting the server", total=None, unit="")
        return lambda: self.update(task, total=1, completed=1)

    def announce(self, line: str) -> None:
        self.print(f"[bold]{escape(line)}[/bold]", highlight=False)

    def replaying(self, workload: Workload) -> Callable[[int], None]:
        task = self.add_task(workload.name, total=workload.tokens, unit="tokens")
        return lambda count: self.advance(task, count)

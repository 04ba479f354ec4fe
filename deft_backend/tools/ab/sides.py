"""The two servers of a comparison: running servers, or servers that the command starts."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from deft_backend.tools.ab.progress import Progress
from deft_backend.tools.harness.server_counters import ServerCounters
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
        """Raise :class:`AbError` if the plugin was asked for, and counted no decode step."""
        counted = self.counters().read() if self.plugin else None
        if self.log is None or not self.plugin or (counted and counted.decode_steps):
            return
        line = refusal(self.log.read_text(errors="replace"))
        why = f"its log says {line!r}" if line else "the plugin counted no step; run 'deft doctor'"
        raise AbError(
            f"the server was started with --attention-backend {self.plugin}, but {why}. The log "
            f"is {self.log}"
        )


@dataclass(frozen=True)
class Side:
    """One of the two servers."""

    name: str  # in the report
    open: Callable[[], AbstractContextManager[RunningServer]]  # a context manager around the server


def running_sides(urls: tuple[str, str], folder: Path, progress: Progress) -> tuple[Side, Side]:
    """Two running servers, called A and B; `folder` holds state files of this machine."""

    @contextmanager
    def opened(name: str, url: str) -> Iterator[RunningServer]:
        progress.announce(f"{name}: {url}")
        yield RunningServer(url, folder)

    first, second = urls
    return Side("A", partial(opened, "A", first)), Side("B", partial(opened, "B", second))


def started_sides(
    model: str, host: str, logs: Path, progress: Progress, *, policy: str | None,
    baseline: str | None, host_arguments: Sequence[str],
) -> tuple[Side, Side]:  # fmt: skip
    """The host with its own backend, and with the plugin; each runs while it is measured."""

    def command(side: str, state_folder: str) -> ServerCommand:
        observe: Mapping[str, str] = {"DEFT_OBSERVE": "1"} if side == "host" else {}
        return server_command(
            model, free_port(), host=host, backend=baseline if side == "host" else BACKEND,
            policy=policy if side == "deft" else None, host_arguments=host_arguments,
            environment={"DEFT_STATE_DIR": state_folder, **observe},
        )  # fmt: skip

    @contextmanager
    def opened(side: str) -> Iterator[RunningServer]:
        log = logs / f"{side}.log"
        with TemporaryDirectory(prefix="deft-state-") as state_folder:
            started = command(side, state_folder)
            answers = progress.starting(side, started)
            with ServerProcess(started, log) as server:
                answers()
                yield RunningServer(
                    server.url, Path(state_folder), started.shell(), log, server.check_alive,
                    BACKEND_NAMES[host] if side == "deft" else "",
                )  # fmt: skip

    return Side("host", partial(opened, "host")), Side("deft", partial(opened, "deft"))


def refusal(log: str) -> str | None:
    """The line in which the plugin leaves a server to its host's own backend; None: no line."""
    lines = [line[line.index("deft: ") :] for line in log.splitlines() if _REFUSED.search(line)]
    return lines[-1] if lines else None

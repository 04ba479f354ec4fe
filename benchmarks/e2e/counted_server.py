"""A host server and the plugin's counters of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from deft_backend.files.folders import state_directory
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.state_reader import running_here, settled_counters
from deft_backend.tools.servers.command import ServerCommand
from deft_backend.tools.servers.process import ServerProcess


class CountedServer:
    """Context manager around a server; inside the block it answers requests.

    - `command`: makes the server's command.
    - `log`: receives the server's output.
    - `timeout`: seconds until the server must answer.
    - `on_start`: called with the command before the server starts. It returns a function. While the
      server starts, that function gets the seconds waited so far, about every quarter second.

    Raises StartError, DriverStubError on entry, if the server cannot be started or does not answer
    in time.
    """

    process: ServerProcess

    def __init__(
        self,
        command: Callable[[], ServerCommand],
        log: Path,
        *,
        timeout: float = 600.0,
        on_start: Callable[[ServerCommand], Callable[[float], None]] | None = None,
    ) -> None:
        self._make_command = command
        self._log = log
        self._timeout = timeout
        self._on_start = on_start
        self._open = ExitStack()

    def __enter__(self) -> CountedServer:
        with ExitStack() as opened:
            command = self._make_command()
            progress = self._on_start(command) if self._on_start else None
            process = ServerProcess(command, self._log, timeout=self._timeout, progress=progress)
            self.process = opened.enter_context(process)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    @property
    def command(self) -> ServerCommand:
        return self.process.command

    @property
    def url(self) -> str:
        return self.process.url

    def counters(self) -> Counters | None:
        """The counters after the server has come to rest; None if the plugin writes none.

        Raises StateError if the file cannot be read, or the counters still move after 10 s.
        """
        path = running_here(state_directory(Settings.from_env()), self.command.port)
        return None if path is None else settled_counters(path)

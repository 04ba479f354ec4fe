"""A host server as a child process: start it, wait for it, and always end its process tree."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path

from deft_backend.files.folders import create_private
from deft_backend.files.private_files import open_private
from deft_backend.tools.servers.command import ServerCommand, StartError

_LAST_LINES = 15
_POLL_SECONDS = 0.25


class ServerProcess:
    """Context manager around a server; inside the block it answers requests.

    In a process with the default action for SIGTERM, the signal raises KeyboardInterrupt from the
    first entry on, so that it also ends the server. Python allows this in the main thread only.

    - `command`: the server to start.
    - `log`: receives the server's output.
    - `timeout`: seconds to wait until it answers.
    - `progress`: called about every quarter second while waiting, with the seconds waited so far.

    Raises StartError on entry, if the server ends or does not answer in time. The message shows
    where the log is, and its end.
    """

    def __init__(
        self,
        command: ServerCommand,
        log: Path,
        *,
        timeout: float = 600.0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.command = command
        self.log = log
        self._timeout = timeout
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.command.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> ServerProcess:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        create_private(self.log.parent)
        with open_private(self.log) as output:
            self._process = subprocess.Popen(
                self.command.arguments,
                env=self.command.full_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group: Ctrl-C reaches only us
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_alive(self) -> None:
        """Raise :class:`StartError` with the end of the log if the server has ended."""
        if self._process is None:
            raise StartError("the server was not started; use it as a context manager")
        code = self._process.poll()
        if code is not None:
            raise StartError(f"the server ended with exit code {code}. {self._end_of_log()}")

    def stop(self) -> None:
        """End the server and every process it started: ask, wait 15 s, then kill."""
        process, self._process = self._process, None
        if process is None:
            return
        members = _tree(process.pid)
        try:
            # Ask only the server: it ends its workers. If a worker ended first, the server would
            # report a crash.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
        finally:  # an interrupted wait must leave no server behind either
            _kill_tree(process.pid, members)
            process.wait()

    def _wait_until_healthy(self) -> None:
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < self._timeout:
            self.check_alive()
            pages = (f"{self.url}/health", f"{self.url}/v1/models")
            if any(get_page(page, 5.0) is not None for page in pages):
                self.check_alive()  # our server answered, not another one on the same port
                return
            if self._progress:
                self._progress(waited)
            time.sleep(_POLL_SECONDS)
        raise StartError(
            f"the server did not answer on port {self.command.port} within {self._timeout:.0f} s. "
            f"{self._end_of_log()}"
        )

    def _end_of_log(self) -> str:
        with self.log.open(errors="replace") as lines:
            last = "".join(deque(lines, maxlen=_LAST_LINES)).rstrip()
        return f"The log is {self.log}; it ends with:\n{last or '(nothing)'}"


def _tree(pid: int) -> list[int]:
    """All descendants of a process, in its process group or not."""
    try:
        import psutil
    except ImportError:  # without psutil, only the process group ends
        return []
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill_tree(leader: int, members: list[int]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for pid in members:
        # Only if it is still in the same session: another process may have this id by now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def get_page(url: str, seconds: float = 10.0) -> str | None:
    """What a server answers to a GET; None if it does not answer, or with another status than 200.

    Proxies of the environment do not count: they cannot reach this machine's loopback interface.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=seconds) as response:
            return str(response.read().decode(errors="replace")) if response.status == 200 else None
    except (http.client.HTTPException, OSError, ValueError):
        return None

"""A host server as a child process: start it, wait for it, and always end its process tree."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deft_backend.files.folders import create_private
from deft_backend.files.private_files import open_private
from deft_backend.tools.servers import sessions
from deft_backend.tools.servers.command import ServerCommand, StartError

_LAST_LINES = 15
_POLL_SECONDS = 0.25
_REAP_SECONDS = 3.0  # until the system has ended a killed process


class ServerProcess:
    """Context manager around a server; inside the block it answers requests. The server ends with
    the block, and also if this process is killed: a small process watches for that. SIGTERM raises
    KeyboardInterrupt from the first entry on, in the main thread. Raises StartError on entry, with
    the log's end.
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
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> ServerProcess:
        create_private(self.log.parent)
        try:
            with open_private(self.log) as output, _held_signals():
                self._guard = subprocess.Popen(
                    [sys.executable, "-S", sessions.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd="/",
                )
                self._process = subprocess.Popen(
                    self.command.arguments,
                    env=self.command.full_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its own process group: Ctrl-C reaches only us
                )
                self._tell_guard(self._process.pid)
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_alive(self) -> None:
        assert self._process is not None
        code = _exit_code(self._process)
        if code is not None:
            raise StartError(f"the server ended with exit code {code}. {self._end_of_log()}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            sessions.end_session(process.pid)
            end = time.monotonic() + _REAP_SECONDS
            while _exit_code(process) is None and time.monotonic() < end:
                time.sleep(0.02)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
            process.returncode = 0  # so that nobody waits for it again
        self._tell_guard(0)

    def _tell_guard(self, leader: int) -> None:
        """Tell the guard which session to end if this process dies; 0: none, and it ends."""
        guard = self._guard
        if guard is None or guard.stdin is None or guard.stdin.closed:
            return
        with contextlib.suppress(OSError):  # without a guard, only this process ends the server
            guard.stdin.write(b"%d\n" % leader)
            guard.stdin.flush()
            if not leader:
                guard.stdin.close()
        if not leader:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(timeout=_REAP_SECONDS)

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
            f"the server did not answer on {self.url} within {self._timeout:.0f} s. "
            f"{self._end_of_log()}"
        )

    def _end_of_log(self) -> str:
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            last = "".join(deque(lines, maxlen=_LAST_LINES)).rstrip()
        return f"The log is {self.log}; it ends with:\n{last or '(nothing)'}"


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a child that has ended, or None; its process id stays taken.

    `Popen.poll` takes a lock. An interrupt at the wrong moment leaves it locked, and a later
    `Popen.wait` then waits for ever.
    """
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has waited for it
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


@contextmanager
def _held_signals() -> Iterator[None]:
    """Let signals wait until the block ends: a server must not start unseen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in numbers
        if signal.getsignal(number) not in (None, signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])


def get_page(url: str, seconds: float = 10.0) -> str | None:
    """What a server answers to a GET, past all proxies; None without an answer of status 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=seconds) as response:
            return str(response.read().decode(errors="replace")) if response.status == 200 else None
    except (http.client.HTTPException, OSError, ValueError):
        return None

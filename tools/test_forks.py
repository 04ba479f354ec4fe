"""Tests in forks of one process that has imported PyTorch and the hosts: for ``tools.faults``.

A run is one line of JSON on standard input, and its answer is one line on standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path.cwd()
OPTIONS = ("-q", "-m", "not rare", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no")
CALLS = 30
"""In each test, lines of a function count for its first calls only: tracing all would take long."""


class Reached:
    """Writes a line for each test: its seconds, its lines, and newly imported modules.

    A test that runs must pass to get a line. A test that is only collected gets one.
    """

    def __init__(self, out: str, sources: Sequence[str]) -> None:
        self._out = out
        self._own = tuple(f"{ROOT}/{source}/" for source in sources)
        self._modules = set(sys.modules)
        self._lines: set[tuple[str, int]] = set()
        self._calls: Counter[tuple[str, int]] = Counter()
        self._failed = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items if session.config.option.collectonly else ():
            self._write(item.nodeid, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= not report.passed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._lines.clear()
        self._calls.clear()
        self._failed = False
        began = time.monotonic()
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            if not self._failed:
                self._write(item.nodeid, time.monotonic() - began)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._own):
            return None
        function = code.co_filename, code.co_firstlineno
        self._calls[function] += 1
        return self._trace_line if self._calls[function] <= CALLS else None

    def _trace_line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace_line

    def _write(self, test: str, seconds: float) -> None:
        if str(ROOT) in test:  # another copy has other names
            return
        lines: dict[str, list[int]] = {}
        for path, line in sorted(self._lines):
            lines.setdefault(str(Path(path).relative_to(ROOT)), []).append(line)
        modules = [name for name in sys.modules if name not in self._modules]
        self._modules.update(modules)
        files = {name: _file_of(name) for name in modules}
        known = [name for name, file in files.items() if file and not file.startswith(f"{ROOT}/")]
        row = {"test": test, "seconds": seconds, "lines": lines, "modules": known}
        with open(self._out, "a") as out:
            print(json.dumps(row), file=out)


def _file_of(module: str) -> str:
    return str(getattr(sys.modules[module], "__file__", None) or "")


class FirstFailure:
    """Tells the parent which test failed."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, report.nodeid.encode() + b"\n")


def preload(modules: list[str]) -> None:
    """Import what the tests need of other packages; nothing of the checkout may stay."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name in [name for name in sys.modules if _file_of(name).startswith(f"{ROOT}/")]:
        if name != "__main__":
            del sys.modules[name]


def run(
    tests: list[str], seconds: float, reached: str = "", sources: Sequence[str] = ()
) -> dict[str, Any]:
    """The exit status of pytest in a fork, and the first test that failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        plugins: list[Any] = [FirstFailure(write)]
        if reached:
            plugins.append(Reached(reached, sources))
        else:
            sys.dont_write_bytecode = "--collect-only" not in tests  # a mutant's must not stay
            tests = ["-x", *tests]
        status = 3
        with contextlib.suppress(BaseException):
            status = int(pytest.main([*OPTIONS, *tests], plugins))
        os._exit(status)
    os.close(write)
    began, done, status = time.monotonic(), 0, 0
    while not done and time.monotonic() - began < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started, too
    if not done:
        os.waitpid(child, 0)
    with os.fdopen(read, errors="replace") as pipe:
        os.set_blocking(read, False)
        failed = (pipe.read() or "").split("\n")[0]
    return {"status": os.waitstatus_to_exitcode(status) if done else -1, "failed": failed}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "r+") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    for line in sys.stdin:
        asked = json.loads(line)
        preload(asked.pop("modules", []))
        print(json.dumps(run(**asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()

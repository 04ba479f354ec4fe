"""The commands on other people's machines: other users, homes, file systems, broken packages."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from functools import partial

import pytest

from deft_backend.telemetry.metrics import StateCollector
from failure_lines import raising
from strangers import as_stranger, interpreter, missing

REASON = missing()
strange = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return interpreter(tmp_path_factory.mktemp("python"))


@pytest.fixture
def deft_of_a_stranger(python, tmp_path):
    """Runs a command as another user; returns its exit code and its output."""
    return partial(as_stranger, python, tmp_path)


@strange
@pytest.mark.parametrize("words", [("top", "--once"), ("inspect",), ("explain", "--server")])
def test_a_home_that_cannot_be_read_is_one_line(words, deft_of_a_stranger, tmp_path):
    """As in a container with `--user` and HOME=/root."""
    code, said = deft_of_a_stranger(*words, HOME=tmp_path / "closed")
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith("Error: cannot read the folder of servers' state ")
    assert f"{tmp_path}/closed/.cache/deft-backend/servers: Permission denied" in line
    assert "DEFT_CACHE_DIR" in line


def checks(said, part):
    return {each["subject"]: each for each in json.loads(said)[part]}


@pytest.mark.parametrize("module", ["numpy", "triton"])
def test_doctor_imports_what_a_server_imports(module, tmp_path):
    """A package that is there and cannot be imported; other commands say it in one line."""
    broken = tmp_path / module
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libm.so.7 is missing')")

    def deft(*words):
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
        command = [sys.executable, "-m", "deft_backend", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    code, said, _ = deft("doctor", "--json")
    imports = checks(said, "installed")["imports"]
    assert (code, imports["status"]) == (1, "problem")
    assert imports["state"].startswith(f"{module} is installed, but cannot be imported: ")
    assert "libm.so.7 is missing" in imports["state"]
    code, _, said = deft("explain", "--tree", "1,2 8,8")
    last = "Error: libm.so.7 is missing; run 'deft doctor' for what is missing"
    assert module != "numpy" or (code, said.splitlines()[-1]) == (2, last)


def view(folder, number, *, terminal):
    """What `deft top` prints until a signal ends it, and its exit code."""
    leader, follower = pty.openpty() if terminal else os.pipe()
    words = [sys.executable, "-m", "deft_backend", "top", "--interval", "0.1"]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "DEFT_CACHE_DIR": str(folder)},
    )
    os.close(follower)
    said = b""
    while said.count(b"deft top") < 2:  # it looks again
        said += os.read(leader, 4096)
    process.send_signal(number)
    with contextlib.suppress(OSError):
        while more := os.read(leader, 4096):
            said += more
    os.close(leader)
    return said, process.wait(60)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "terminal"), [(signal.SIGTERM, True), (signal.SIGHUP, True), (signal.SIGTERM, False)]
)
def test_top_leaves_the_terminal_as_it_was(number, terminal, tmp_path):
    """Into a file it prints each look."""
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores it
    try:
        said, code = view(tmp_path, number, terminal=terminal)
    finally:
        signal.signal(number, before)
    assert code == 128 + number
    assert terminal or b"\x1b" not in said
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert not terminal or 0 <= said.rindex(on) < said.rindex(off)  # the screen, the cursor


def test_a_collector_never_raises(tmp_path, monkeypatch):
    """A folder that cannot be read must not cost a host its page of metrics."""
    pytest.importorskip("prometheus_client")
    collector = StateCollector(tmp_path / "missing", 1)
    assert collector.collect() == []
    refused = raising(PermissionError(13, "Permission denied"))
    monkeypatch.setattr("deft_backend.telemetry.state_reader.os.listdir", refused)
    assert StateCollector(tmp_path, 1).collect() == []

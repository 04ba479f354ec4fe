"""The commands on other people's machines: other users, homes, file systems, broken packages."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from deft_backend.telemetry.metrics import StateCollector
from failure_lines import raising

ROOT = Path(__file__).parents[2]
UID = 12345  # without an entry in the system's list of users

strange = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="root alone can become another user, by setpriv",
)


def opened(folder):
    """Let others enter a folder of the tests."""
    for place in (folder, *folder.parents):
        if place.stat().st_uid == os.getuid() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o055)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Python where everybody may run it: a copy, if it is in somebody's home."""
    folder = tmp_path_factory.mktemp("python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    if all(place.stat().st_mode & 0o005 == 0o005 for place in (base, *base.parents)):
        return base / "bin" / version
    opened(folder)
    unneeded = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "*.a")
    shutil.copytree(base / "lib" / version, folder / "lib" / version, ignore=unneeded)
    for library in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(library, folder / "lib" / library.name)
    (folder / "bin").mkdir()
    return Path(shutil.copy2(base / "bin" / version, folder / "bin" / version))


@pytest.fixture
def deft_of_a_stranger(python, tmp_path):
    """Runs a command as another user; returns its exit code and its output.

    The stranger may enter the test's folder, but not `closed` in it. A command has no variables but
    the given ones and those of Python.
    """
    (tmp_path / "closed").mkdir(mode=0o700)
    opened(tmp_path)
    paths = [ROOT, ROOT / "patches", sysconfig.get_paths()["purelib"]]
    usual = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    usual |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "COLUMNS": "300"}

    def run(*words, **environment):
        variables = [f"{name}={value}" for name, value in {**usual, **environment}.items()]
        user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        command = [*user, "env", "-i", "-C", tmp_path, *variables, python, "-m", "deft_backend"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    return run


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


@strange
def test_doctor_in_a_home_that_cannot_be_read(deft_of_a_stranger, tmp_path):
    code, said = deft_of_a_stranger("doctor", "--json", HOME=tmp_path / "closed")
    folder = checks(said, "settings")["state folder"]
    assert folder["status"] == "note"
    assert (
        "closed/.cache/deft-backend/servers cannot be written: Permission denied"
        in (folder["state"])
    )
    assert folder["remedy"].startswith("export DEFT_CACHE_DIR=/tmp/deft-$(id -u)")
    if "driver" in checks(said, "machine") and code:  # SGLang's CPU engine needs the stand-in
        assert "closed/.cache" in checks(said, "machine")["driver"]["state"]


@strange
def test_a_user_without_a_home_has_a_folder_under_the_temporary_one(deft_of_a_stranger):
    code, said = deft_of_a_stranger("top", "--once", TMPDIR="/tmp")
    assert code == 1
    assert f"according to /tmp/deft-backend-{UID}/servers." in said
    code, said = deft_of_a_stranger("explain", "--tree", "1,4 64,8")
    assert code == 0, said


@pytest.mark.parametrize("module", ["numpy", "triton"])
def test_doctor_imports_what_a_server_imports(module, tmp_path):
    """A package that is there and cannot be imported; other commands say it in one line."""
    broken = tmp_path / module
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libm.so.7 is missing')")

    def deft(*words):
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, "-m", "deft_backend", *words],
            env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    code, said, _ = deft("doctor", "--json")
    imports = checks(said, "installed")["imports"]
    assert (code, imports["status"]) == (1, "problem")
    assert imports["state"].startswith(f"{module} is installed, but cannot be imported: ")
    assert "libm.so.7 is missing" in imports["state"]
    code, _, said = deft("explain", "--tree", "1,2 8,8")
    if module == "numpy":
        assert (code, said.splitlines()[-1]) == (
            2,
            "Error: libm.so.7 is missing; run 'deft doctor' for what is missing",
        )


def view(folder, number, *, terminal):
    leader, follower = pty.openpty() if terminal else os.pipe()
    words = [sys.executable, "-m", "deft_backend", "top"]
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_leaves_the_terminal_as_it_was(number, tmp_path):
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores it
    try:
        said, code = view(tmp_path, number, terminal=True)
    finally:
        signal.signal(number, before)
    assert code == 128 + number
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert 0 <= said.rindex(on) < said.rindex(off)  # the other screen, the hidden cursor


@pytest.mark.timeout(120)
def test_top_prints_each_look_into_a_file(tmp_path):
    said, code = view(tmp_path, signal.SIGTERM, terminal=False)
    assert code == 128 + signal.SIGTERM
    assert b"\x1b" not in said


def test_a_collector_never_raises(tmp_path, monkeypatch):
    """A folder that cannot be read must not cost a host its page of metrics."""
    pytest.importorskip("prometheus_client")
    collector = StateCollector(tmp_path / "missing", 1)
    assert collector.collect() == []
    refused = raising(PermissionError(13, "Permission denied"))
    monkeypatch.setattr("deft_backend.telemetry.state_reader.os.listdir", refused)
    assert StateCollector(tmp_path, 1).collect() == []

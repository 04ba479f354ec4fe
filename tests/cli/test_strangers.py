"""The commands on other people's machines: other users, homes, file systems, broken packages."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from commands import run
from deft_backend.cli import doctor
from deft_backend.compile.usable_cpus import usable_cpus
from deft_backend.files import folders
from deft_backend.files.folders import cache_directory, write_fails
from deft_backend.settings.config import SettingsError
from deft_backend.telemetry.counters import process_runs
from deft_backend.telemetry.metrics import StateCollector
from deft_backend.tools.servers import sessions
from failure_lines import raising
from strangers import ROOT, UID, as_stranger, interpreter, missing

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


@strange
def test_a_cache_on_a_file_system_without_programs(deft_of_a_stranger, tmp_path):
    code, said = deft_of_a_stranger(
        "serve", "--dry-run", "--host", "sglang", DEFT_CACHE_DIR=tmp_path / "noexec/own"
    )
    assert code == 2
    assert "noexec, from which no library can be loaded; set DEFT_CACHE_DIR" in said


def test_without_a_home_another_users_folder_is_refused(tmp_path, monkeypatch):
    for name in ("DEFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(folders.os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"deft-backend-{os.getuid()}"
    assert cache_directory() == own
    own.mkdir()
    assert cache_directory() == own
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(SettingsError, match=r"no home folder.*set DEFT_CACHE_DIR"):
        cache_directory()


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/x", "/sys/x"])
def test_a_folder_that_cannot_be_made_is_no_folder(folder):
    assert write_fails(Path(folder)) is not None


def deft(*words, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "deft_backend", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("package", ["numpy", "triton"])
def test_a_package_that_is_installed_and_broken(package, tmp_path):
    """`doctor` imports what a server imports; the other commands say it in one line."""
    (tmp_path / package).mkdir()
    broken = "raise ImportError('libbroken.so: cannot open shared object file')\n"
    (tmp_path / package / "__init__.py").write_text(broken)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "patches")])
    code, said = deft("doctor", "--check", "--json", PYTHONPATH=path)
    assert code == 1
    content = json.loads(said)
    assert not content["works"]
    found = checks(said, "installed")["imports"]
    assert found["status"] == "problem"
    assert f"{package} is installed, but cannot be imported" in found["state"]
    assert "libbroken.so: cannot open" in found["state"]
    code, said = deft("warm", "--target", "sm_90", PYTHONPATH=path)
    assert code == 2
    assert said.splitlines()[-1].endswith("run 'deft doctor' for what is missing")
    assert "Traceback" not in said


def test_a_cache_folder_whose_name_is_no_utf8(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    code, said = deft("top", "--once", DEFT_CACHE_DIR=folder)
    assert code == 1
    assert "No server with the plugin is running" in said
    code, said = deft("doctor", "--json", DEFT_CACHE_DIR=folder)
    assert checks(said, "settings")["state folder"]["status"] == "ok"
    assert os.path.isdir(folder)


def test_a_working_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    path = os.pathsep.join([str(ROOT), str(ROOT / "patches")])
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"
    code += "import sys; sys.argv = ['deft', 'serve', '--dry-run', '--host', 'vllm']\n"
    code += "from deft_backend.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "models/tiny-llama" in done.stdout


def test_processes_with_any_name_are_seen():
    """The name of a process is in the file that tells whether it runs."""
    name = b"a) Z \xff\xfe"
    code = f"import ctypes, sys; ctypes.CDLL(None).prctl(15, {name!r}); print(1, flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", code + "sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert Path(f"/proc/{process.pid}/comm").read_bytes().strip() == name
        assert process_runs(process.pid)
        assert sessions._state(process.pid) in ("S", "R")
        process.kill()
    assert not process_runs(process.pid)


def test_control_groups_with_any_name(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    group = tmp_path / "proc" / "self" / "cgroup"
    group.write_bytes(b"0::/\xff\xfe\nno group\n\n1:cpu:/../../x\n")
    assert usable_cpus(tmp_path) >= 1
    folder = os.fsencode(tmp_path) + b"/sys/fs/cgroup/\xff\xfe"
    os.makedirs(folder)
    with open(folder + b"/cpu.max", "w") as file:
        file.write("100000 100000")
    assert usable_cpus(tmp_path) == 1


def test_a_collector_never_raises(tmp_path, monkeypatch):
    """A folder that cannot be read must not cost a host its page of metrics."""
    pytest.importorskip("prometheus_client")
    collector = StateCollector(tmp_path / "missing", 1)
    assert collector.collect() == []
    refused = raising(PermissionError(13, "Permission denied"))
    monkeypatch.setattr("deft_backend.telemetry.metrics.os.listdir", refused)
    assert StateCollector(tmp_path, 1).collect() == []


@pytest.mark.parametrize("ran", [0, 1, 2])
def test_doctor_says_how_many_cases_ran(ran, monkeypatch):
    case = {"heads": "4/2", "head_dim": 64, "dtype": "float16", "kv": "float16", "case": "decode"}
    cases = [{**case, "error": 1e-4 if at < ran else None, "failure": None} for at in range(2)]
    monkeypatch.setattr(doctor, "_checked", lambda shapes, until: cases)
    monkeypatch.setattr(doctor, "tiny_model", lambda: None)
    code, said, _ = run("doctor", "--check")
    assert (code != 0) == (ran == 0) or "cannot work" in said
    assert ("of 2 cases ran within 20 s" in said) == (ran < 2)
    assert ("no case of --check ran" in said) == (ran == 0)
    assert "compiled first" not in said  # the interpreter compiles nothing
    if ran:
        assert "try deft ab --quick --model M, or deft serve --model M" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--attention-backend", "deft"), "options of the host server go behind '--'"),
        (("serve", "--", "--attention-backend", "triton"), "it would replace the plugin"),
        (("ab", "--", "--decode-attention-backend=triton"), "it would replace the plugin"),
        (("ab", "--", "--api-key", "K"), "set OPENAI_API_KEY to the same key"),
        (("ab", "--", "--port", "99999999"), "--port is '99999999'; expected a number"),
        (("ab", "--", "--context-length", "1000"), "pass --prefix-tokens "),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(words, said, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if words[0] == "ab":
        pytest.importorskip("sglang")
        words = ("ab", "--prefix-tokens", "5000", "--workload", "few-shot", *words[1:])
    code, _, err = run(*words)
    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())

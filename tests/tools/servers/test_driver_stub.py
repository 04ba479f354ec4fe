"""The driver stand-in: compiled once, with one symbol, and never mistaken for a driver."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deft_backend.cli import checks
from deft_backend.tools.servers import driver_stub
from deft_backend.tools.servers.driver_stub import ensure_driver_stub

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler is installed"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


@needs_compiler
def test_it_exports_the_symbol_and_answers_with_an_error(cache, monkeypatch):
    monkeypatch.setenv("DEFT_CACHE_DIR", str(cache / "chosen"))
    folder = ensure_driver_stub()
    assert folder == cache / "chosen" / "driver-stub" / "1"
    assert {stat.S_IMODE(made.stat().st_mode) for made in (folder, *folder.parents[:2])} == {0o700}
    assert [path.name for path in folder.iterdir()] == ["libcuda.so.1"]
    library = ctypes.CDLL(str(folder / "libcuda.so.1"))
    assert library.cuPointerGetAttribute(None, 0, ctypes.c_ulonglong(0)) != 0
    assert not hasattr(library, "cuInit")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ensure_driver_stub() == folder  # it is compiled once


@needs_compiler
def test_it_is_found_by_its_name_and_is_no_driver(cache):
    if driver_stub.has_nvidia_driver():
        pytest.skip("this machine has a real driver")
    script = (
        "import ctypes; ctypes.CDLL('libcuda.so.1').cuPointerGetAttribute;"
        "from deft_backend.tools.servers.driver_stub import has_nvidia_driver, num_gpus;"
        "print(has_nvidia_driver(), num_gpus())"
    )
    environment = {"LD_LIBRARY_PATH": str(ensure_driver_stub()), "PYTHONPATH": ":".join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert output.split() == ["False", "0"]


@needs_compiler
@pytest.mark.parametrize(
    ("folder", "flag", "content", "said"),
    [
        ("a:b", 0, None, "mean something in LD_LIBRARY_PATH"),
        ("plain", os.ST_NOEXEC, None, "mounted with noexec"),
        ("plain", 0, b"no library", "the stand-in cannot be loaded: OSError: "),
    ],
)
def test_doctor_says_why_the_stand_in_cannot_be_loaded(
    folder, flag, content, said, cache, monkeypatch
):
    monkeypatch.setenv("DEFT_CACHE_DIR", str(cache / folder))
    monkeypatch.setattr(driver_stub.os, "statvfs", lambda path: SimpleNamespace(f_flag=flag))
    monkeypatch.setattr(checks, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(checks, "hosts_with_metadata", lambda: [checks.HOSTS[0]])
    if content is not None:
        (ensure_driver_stub() / driver_stub.SONAME).write_bytes(content)
    (found,) = (check for check in checks.check_device() if check.subject == "driver")
    assert (found.status, said in found.state) == ("problem", True), found.state
    assert found.remedy.startswith("export DEFT_CACHE_DIR=")


@pytest.mark.parametrize(
    ("code", "printed", "said"),
    [(0, "a warning", None), (1, "a\nOSError: b\n", "OSError: b"), (-11, "", "exit code -11")],
)
def test_why_loading_fails(code, printed, said, monkeypatch):
    def run(words, **given):
        assert words[:3] == [sys.executable, "-S", "-c"]
        options = {"capture_output": True, "text": True, "errors": "replace", "check": False}
        assert given == options
        return SimpleNamespace(returncode=code, stderr=printed)

    monkeypatch.setattr(driver_stub.subprocess, "run", run)
    assert driver_stub.loading_fails(Path("/stub")) == said

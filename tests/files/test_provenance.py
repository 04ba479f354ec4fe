"""The origin of a figure, which is stored with every result."""

import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deft_backend.files import provenance as origin


def test_a_gpu_is_named_without_starting_cuda(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'A GPU'\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: pytest.fail("CUDA was started"))
    assert origin.provenance()["device"] == f"A GPU (CUDA {torch.version.cuda})"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "the same GPU")
    assert origin.provenance()["device"] == f"the same GPU (CUDA {torch.version.cuda})"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        origin.provenance()


@pytest.mark.parametrize("changed", ["", " M file"])
def test_the_commit_is_the_checkouts_wherever_the_process_runs(changed, monkeypatch):
    def git(words, **given):
        root = Path(__file__).parents[2]
        assert given == {"cwd": root, "capture_output": True, "text": True, "check": True}
        answers = {
            ("git", "status", "--porcelain", "--untracked-files=no"): changed,
            ("git", "rev-parse", "--short=12", "HEAD"): "0123456789ab\n",
        }
        return subprocess.CompletedProcess(words, 0, answers[tuple(words)])

    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    fake = SimpleNamespace(run=git, CalledProcessError=subprocess.CalledProcessError)
    monkeypatch.setattr("deft_backend.files.provenance.subprocess", fake)
    assert origin.provenance()["commit"] == ("0123456789ab+" if changed else "0123456789ab")
    monkeypatch.setenv("GIT_COMMIT", "abc")
    found = origin.provenance()
    assert (found["commit"], found["device"]) == ("abc", "CPU: x86_64")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert found["versions"].keys() >= {"torch", "triton", "numpy"}
    assert None not in found["versions"].values()


@pytest.mark.parametrize(
    ("archived", "commit"), [("node: 0123456789abcdef", "0123456789ab"), ("$Format:%H$", None)]
)
def test_the_commit_of_an_archive(archived, commit, tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "deft_backend/files/provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert origin.provenance()["commit"] is None
    (tmp_path / ".git_archival.txt").write_text(f"describe: v1\n{archived}\n")
    assert origin.provenance()["commit"] == commit

"""The origin of a figure, which is stored with every result."""

import stat
import sys

import pytest
import torch

from deft_backend.files.provenance import provenance


def test_a_gpu_is_named_without_starting_cuda(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'A GPU'\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: pytest.fail("CUDA was started"))
    assert provenance()["device"] == f"A GPU (CUDA {torch.version.cuda})"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "the same GPU")
    assert provenance()["device"] == f"the same GPU (CUDA {torch.version.cuda})"

"""On a GPU: the check of its kernels passes, and kernels that do not fit are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from triton.compiler import compiler
from triton.runtime.errors import OutOfResources

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common import warm_up
from deft_backend.hosts.common.warm_up import StepTensors, warm_up_attention
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.gpu.checked_variants import report

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these kernels run on a GPU")


@pytest.fixture
def failure(monkeypatch):
    """The check of a server on a GPU without recorded results; its report, and why it failed."""
    monkeypatch.setattr(warm_up, "unrecorded", lambda name: "this GPU")

    def check(head_dim=128):
        attention = TreeAttention(
            num_query_heads=32,
            num_kv_heads=8,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device="cuda",
            max_batch=256,
        )
        cache = torch.zeros(2, 8, head_dim, dtype=torch.bfloat16, device="cuda")
        tensors = StepTensors(cache, cache, [131072])
        warm_up_attention(attention, tensors)
        began = time.perf_counter()
        found = warm_up.failed_self_check(attention, tensors)
        seconds = round(time.perf_counter() - began, 2)
        report("self-check", str(found), {"seconds": seconds})
        return found

    return check


@pytest.mark.parametrize("caches", ["empty", "full"])
def test_doctor_checks_every_case(caches, tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp() / "triton")
    command = [sys.executable, "-m", "deft_backend", "doctor", "--check", "--json"]
    environment = {**os.environ, "TRITON_CACHE_DIR": folder, "DEFT_CACHE_DIR": folder}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    content = json.loads(done.stdout)
    rows = content["check"]
    report(
        "self-check",
        f"doctor, {caches} caches",
        {"seconds": round(time.perf_counter() - began, 2), "rows": rows},
    )
    assert len(rows) == 21
    assert not [row for row in rows if row["failure"]]
    if caches == "full":
        assert not [row for row in rows if row["error"] is None]


def test_sound_kernels_pass(failure):
    assert failure() is None


def test_a_device_with_64_kib_of_shared_memory(failure, monkeypatch):
    """The warm-up cannot load the kernels. A server then logs the error and keeps its backend."""
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 64 * 1024)
    with pytest.raises(OutOfResources, match="shared memory"):
        failure(head_dim=256)  # no other test has loaded these kernels
    report("self-check", "64 KiB of shared memory", {"raised": "OutOfResources"})

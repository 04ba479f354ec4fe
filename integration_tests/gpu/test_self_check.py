"""On a GPU: the check of its kernels passes."""

import json
import os
import subprocess
import sys
import time

import pytest

from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.gpu.checked_variants import report

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these kernels run on a GPU")


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

"""`deft ab --host vllm` as a user runs it: two real servers and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import ROOT


@pytest.mark.timeout(900)
def test_ab_compares_two_servers_and_writes_the_report(tmp_path: Path) -> None:
    command = [
        sys.executable, "-c", "from deft_backend.cli import app; app()", "ab", "--host", "vllm",
        "--workload", "few-shot", "--workload", "parallel-samples", "--branches", "3",
        "--prefix-tokens", "150", "--max-tokens", "6", "--out", str(tmp_path),
        "--", "--block-size", "16", "--max-num-batched-tokens", "512",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name[:5] != "DEFT_"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["same"]
    assert data["backends"] == {"host": "CPU_ATTN", "deft": "CUSTOM"}
    for workload in data["workloads"]:
        # How much depends on the steps in which the requests meet, which is the machine's affair.
        assert 0.0 < workload["kv_saved"] < 1.0
        assert workload["deft"]["counters"]["steps_tree"] > 0
        assert workload["host"]["counters"]["steps_tree"] == 0

"""`deft ab` as a user runs it: two real servers, one after the other, and the report."""

import json
import os
import subprocess
import sys

import pytest

from deft_backend.tools.servers.command import BACKEND_NAMES
from integration_tests.common.hub import NAME, REVISION, write_hub_cache
from integration_tests.common.plugins import CPU_BACKEND, QUICK_INTERPRETER, ROOT, plugin_settings
from integration_tests.common.server import MODEL
from integration_tests.hosts import HOST

OPTIONS = {"sglang": (), "vllm": ("--block-size", "32", "--max-num-batched-tokens", "512")}


@pytest.mark.timeout(900)
def test_ab_compares_two_servers_and_writes_the_report(tmp_path):
    """The model is a hub name with a revision: `deft` and the host find the same snapshot."""
    hub = write_hub_cache(tmp_path / "hub", MODEL)
    words = ["ab", "--out", tmp_path, "--model", NAME, "--workload", "few-shot", "--branches", "3"]
    words += ["--prefix-tokens", "150", "--workload", "parallel-samples", "--max-tokens", "6"]
    words += ["--", "--revision", REVISION, *OPTIONS[HOST]]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name[:5] != "DEFT_" or name == "DEFT_UNTESTED_HOST"
    }
    plugins = [QUICK_INTERPRETER, *([CPU_BACKEND] if HOST == "vllm" else [])]
    # Send even a lone request through the slow kernels. Otherwise a fast machine ends each of these
    # short requests before the next one arrives, and no two requests share a step.
    environment |= {"DEFT_MIN_BATCH": "1", **plugin_settings(tmp_path / "plugins", *plugins), **hub}
    done = subprocess.run(
        [sys.executable, "-m", "deft_backend", *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["same"]
    assert len(data["workloads"]) == 2
    for workload in data["workloads"]:
        # The amount depends on the steps in which requests meet, and so on the machine.
        host, deft = workload["counters"]
        assert 0.0 < workload["kv_bytes_a_step"][1]["saved"] < 1.0
        assert deft["steps_tree"] > 0
        assert host is None  # a server without the plugin counts nothing
        assert workload["agreement"]["largest_gap"] is not None  # every token has a probability
    assert all(side["model"] == NAME for side in data["sides"])
    assert data["sides"][1]["backend"] == BACKEND_NAMES[HOST]
    assert "few-shot" in (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in done.stdout.replace("\n", "")

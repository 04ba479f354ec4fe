"""`deft ab --host vllm` as a user runs it: two real servers and the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from deft_backend.hosts.vllm.versions import backend_name
from integration_tests.common.ab import deft_ab


@pytest.mark.timeout(900)
def test_ab_compares_two_servers_and_writes_the_report(tmp_path: Path) -> None:
    data, _ = deft_ab(
        tmp_path, "--host", "vllm", "--workload", "few-shot", "--workload", "parallel-samples",
        "--branches", "3", "--prefix-tokens", "150", "--max-tokens", "6",
        "--", "--block-size", "32", "--max-num-batched-tokens", "512",
    )  # fmt: skip
    assert len(data["workloads"]) == 2
    assert data["backends"] == {"host": "CPU_ATTN", "deft": backend_name()}

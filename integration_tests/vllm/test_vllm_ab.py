"""`deft ab --host vllm` as a user runs it: two real servers and the report."""

import json

import pytest

from deft_backend.hosts.vllm.versions import backend_name
from integration_tests.common.ab import deft_ab
from integration_tests.common.plugins import CPU_BACKEND
from integration_tests.common.server import DRAFT


@pytest.mark.timeout(900)
def test_ab_compares_two_servers_and_writes_the_report(tmp_path):
    data, _ = deft_ab(
        tmp_path,
        *["--host", "vllm", "--workload", "few-shot", "--workload", "parallel-samples"],
        *["--branches", "3", "--prefix-tokens", "150", "--max-tokens", "6", "--"],
        *["--block-size", "32", "--max-num-batched-tokens", "512"],
        plugins=[CPU_BACKEND],
    )
    assert len(data["workloads"]) == 2
    assert data["sides"][1]["backend"] == backend_name()


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_ab_compares_two_servers_that_speculate(tmp_path):
    data, _ = deft_ab(
        tmp_path,
        *["--host", "vllm", "--workload", "few-shot", "--branches", "3", "--prefix-tokens"],
        *["150", "--max-tokens", "12", "--", "--block-size", "32", "--max-num-batched-tokens"],
        *["512", "--speculative-config"],
        json.dumps({"model": str(DRAFT), "num_speculative_tokens": 3}),
        plugins=[CPU_BACKEND],
    )
    (workload,) = data["workloads"]
    counted = workload["counters"][1]
    assert counted["verified_tokens"] > 0

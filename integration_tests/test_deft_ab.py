"""`deft ab` as a user runs it: two real servers, one after the other, and the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.common.ab import deft_ab


@pytest.mark.timeout(600)
def test_ab_compares_two_servers_and_writes_the_report(tmp_path: Path) -> None:
    data, printed = deft_ab(
        tmp_path, "--workload", "few-shot", "--branches", "3", "--prefix-tokens", "150",
        "--max-tokens", "12",
    )  # fmt: skip
    assert len(data["workloads"]) == 1
    assert "few-shot" in (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in printed.replace("\n", "")

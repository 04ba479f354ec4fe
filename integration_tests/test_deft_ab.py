"""`deft ab` as a user runs it: two real servers, one after the other, and the report."""

import pytest

from integration_tests.common.ab import deft_ab
from integration_tests.common.hub import NAME, REVISION, write_hub_cache
from integration_tests.common.server import MODEL


@pytest.mark.timeout(600)
def test_ab_compares_two_servers_and_writes_the_report(tmp_path):
    """The model is a hub name with a revision: `deft` and the host find the same snapshot."""
    hub = write_hub_cache(tmp_path / "hub", MODEL)
    data, printed = deft_ab(
        tmp_path,
        "--model",
        NAME,
        *["--workload", "few-shot", "--branches", "3", "--prefix-tokens", "150", "--max-tokens"],
        *["12", "--", "--revision", REVISION],
        settings=hub,
    )
    assert len(data["workloads"]) == 1
    assert all(side["model"] == NAME for side in data["sides"])
    assert "few-shot" in (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in printed.replace("\n", "")

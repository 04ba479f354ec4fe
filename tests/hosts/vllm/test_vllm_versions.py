"""vLLM's window and contract, which commands read without an installed vLLM."""

import pytest

from deft_backend.hosts.common.contract import matches, version_key
from deft_backend.hosts.vllm import versions


def test_every_member_is_expected_in_some_version_of_the_window():
    window = versions.VLLM
    lowest, beyond = version_key(window.lowest), version_key(window.beyond)
    tried = [f"0.{minor}.0" for minor in range(lowest[1], beyond[1])]
    assert all(window.holds(version) for version in tried)
    for member in versions.CONTRACT:
        assert any(matches(version, member.versions) for version in tried), member


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.26.0", "CUSTOM"), ("0.31.1", "CUSTOM"), ("0.32.0", "DEFT"), ("0.33.0+cu130", "DEFT")],
)
def test_a_server_is_started_with_our_own_name(version, name):
    assert versions.backend_name(version) == name

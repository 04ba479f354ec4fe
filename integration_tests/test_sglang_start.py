"""Servers that must not start, and servers that the plugin must not change."""

import pytest

from deft_backend.tools.servers.command import StartError
from integration_tests.common.answers import process_of
from integration_tests.sglang_server import Ask, Group, running


def test_a_wrong_setting_stops_the_server(tmp_path):
    """The message names the variable, its value and the allowed values."""
    group = Group(settings={"DEFT_POLICY": "fastest"})
    with pytest.raises(StartError) as refused, running("deft", group, tmp_path):
        pass
    message = str(refused.value)
    assert "DEFT_POLICY is 'fastest'; expected one of " in message
    assert "auto" in message


@pytest.mark.xdist_group(process_of("default"))
def test_another_backend_is_left_alone(baseline):
    """The baseline runs the host's own backend."""
    baseline.complete([Ask("A short line about rain.", tokens=4)] * 2)
    assert baseline.is_left_alone()
    assert not baseline.trouble()

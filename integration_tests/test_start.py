"""Servers that must not start, and servers that the plugin must not change."""

from dataclasses import replace

import pytest

from deft_backend.tools.servers.command import StartError
from integration_tests.common.answers import process_of
from integration_tests.common.server import Ask, Group
from integration_tests.hosts import WATCHED, WITHOUT_PLUGINS, running

RAIN = [Ask("A short line about rain.", tokens=4)] * 2


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
    baseline.complete(RAIN)
    assert baseline.is_left_alone()
    assert not baseline.trouble()


@pytest.mark.rare
def test_an_installed_plugin_changes_nothing_that_anybody_sees(tmp_path):
    """A server that does not ask for the plugin, beside one that does not load it."""
    seen = []
    for settings in ({}, WITHOUT_PLUGINS):
        group = replace(WATCHED, settings=settings)
        with running(None, group, tmp_path / str(len(settings))) as server:
            server.complete(RAIN)
            seen.append((server.settings(), *server.traits()))
    (settings, *traits), (settings_without, *traits_without) = seen
    assert settings == settings_without
    for installed, without in zip(traits, traits_without, strict=True):
        assert installed ^ without == set()

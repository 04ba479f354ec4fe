"""Servers that must not start, and servers that the plugin must not change."""

import json

import pytest

from deft_backend.tools.servers.command import StartError
from integration_tests.common.answers import process_of
from integration_tests.common.server import EAGER
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


@pytest.mark.rare
def test_an_installed_plugin_changes_nothing_that_anybody_sees(tmp_path):
    """A server that does not ask for the plugin, beside one that does not load it."""
    seen = []
    for settings in ({}, {"SGLANG_PLUGINS": "none"}):
        group = Group(("--enable-metrics",), settings)
        with running(None, group, tmp_path / str(len(settings))) as server:
            server.complete([Ask("A short line about rain.", tokens=4)] * 2)
            seen.append((settings_of(server), *server.traits()))
    (settings, *traits), (settings_without, *traits_without) = seen
    assert settings == settings_without
    for installed, without in zip(traits, traits_without, strict=True):
        assert installed ^ without == set()


@pytest.mark.rare
def test_a_decode_server_of_a_pair(tmp_path):
    """The host's stand-in for transfers leaves the prompts' KV blank: the host's kernel is the
    reference, in every layer.
    """
    flags = "--disaggregation-mode decode --disaggregation-transfer-backend fake"
    backup = "--disaggregation-decode-retraction-backup none"  # the default needs a GPU
    group = Group((*flags.split(), *backup.split()), {**EAGER, "DEFT_VERIFY": "1"})
    with running("deft", group, tmp_path) as server:
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"sampling_params": sampling, "bootstrap_host": "2.2.2.2"}
        for tokens in (40, 41):
            found = server.post("generate", {**body, "input_ids": list(range(5, tokens))})
            assert len(found["output_ids"]) == 12
        assert not server.trouble()
        assert "Give --disaggregation-decode-enable-radix-cache" in server.log
        state = server.state()
        assert state["steps_tree"] > 20
        assert not state["steps_host"]


VOLATILE = ("port", "nccl_port", "random_seed", "internal_states", "launch_command", "startup_time")


def settings_of(server):
    with server.open("server_info") as response:
        found = json.load(response)
    return {name: value for name, value in found.items() if name not in VOLATILE}

"""Servers of the installed host, and what only its own endpoints do.

SGLang and vLLM exclude each other in one environment, and the tests ask both the same questions.
"""

import shlex
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from deft_backend.tools.servers.command import free_port, installed_hosts, server_command
from integration_tests.common.server import started, state_settings

HOST = next(iter(installed_hosts()), "sglang")
_MODULE = import_module(f"integration_tests.hosts.{HOST}")

GROUPS = _MODULE.GROUPS
HostServer = _MODULE.HostServer
WATCHED = _MODULE.WATCHED
WITHOUT_PLUGINS = _MODULE.WITHOUT_PLUGINS


def command_of(backend, group, folder, adapter=None):
    """The command of a server without a GPU. It checks every decode step against the host's kernel,
    unless the group's settings say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    plugins, settings, flags = _MODULE.asked_of(group, folder, adapter)
    plugins = (*plugins, *group.plugins)
    command = server_command(
        str(group.model),
        free_port(),
        host=HOST,
        backend=backend,
        host_arguments=shlex.split(f"{flags} --served-model-name tiny {group.flags}"),
        environment={**state_settings(backend, folder, *plugins), **settings, **group.settings},
        gpu=False,
    )
    if group.cli:
        script = str(Path(sys.executable).parent / "sglang")
        command = replace(command, arguments=(script, "serve", *command.arguments[3:]))
    return command


def running(backend, group, folder, adapter=None):
    """A server for a `with` block."""
    return started(command_of(backend, group, folder, adapter), folder, HostServer)

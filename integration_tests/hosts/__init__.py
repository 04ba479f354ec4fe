"""Servers of the installed host, and what only its own endpoints do.

SGLang and vLLM exclude each other in one environment, and the tests ask both the same questions.
"""

from importlib import import_module

from deft_backend.tools.servers.command import installed_hosts

HOST = next(iter(installed_hosts()), "sglang")
_MODULE = import_module(f"integration_tests.hosts.{HOST}")

GROUPS = _MODULE.GROUPS
HostServer = _MODULE.HostServer
running = _MODULE.running
WATCHED = _MODULE.WATCHED
WITHOUT_PLUGINS = _MODULE.WITHOUT_PLUGINS

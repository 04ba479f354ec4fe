"""Entry point of SGLang's plugin group: runs in every process of every server on the machine."""

from __future__ import annotations

import logging
from typing import Any

from deft_backend.hosts.common.limits import observing
from deft_backend.hosts.sglang import arguments
from deft_backend.hosts.sglang.surround import surround_backends

logger = logging.getLogger("deft_backend")


def register() -> None:
    """Add the choice ``deft``; change nothing in a server that does not ask for it.

    Whatever fails here costs one line in the log.
    """
    try:
        _register()
    except Exception as error:
        logger.warning("deft: the plugin is not available in this server: %r", error)


def _register() -> None:
    from sglang.srt import server_args as host

    from deft_patches import sglang_backend_names, sglang_resolve_arguments

    if sglang_resolve_arguments.method() is None:
        logger.warning("deft: this SGLang resolves its arguments in no known way; not registered")
        return
    # The hook first: without it the name would reach code of the host that does not know it.
    sglang_resolve_arguments.install(arguments.resolve)
    if arguments.NAME not in host.ATTENTION_BACKEND_CHOICES:
        host.ATTENTION_BACKEND_CHOICES.append(arguments.NAME)
    surround_backends()
    absent = sglang_backend_names.missing()
    if absent is None:
        sglang_backend_names.install(_before_backends)
    elif observing():  # tree attention no server gets: arguments.py
        logger.warning("deft: DEFT_OBSERVE does not work with this SGLang (%s)", absent)


def _before_backends(server_args: Any) -> None:
    """All plugins are there now: those that came after ours, too."""
    if hasattr(server_args, arguments.HOST_DECODE):
        surround_backends()
    elif observing():
        from deft_backend.hosts.sglang import observe

        observe.install()

"""Entry point of SGLang's plugin group: runs in every process of every server on the machine."""

from __future__ import annotations

import logging

from deft_backend.hosts.sglang import versions
from deft_backend.hosts.sglang.start import arguments
from deft_backend.hosts.sglang.start.surround import surround_backends

logger = logging.getLogger("deft_backend")


def register() -> None:
    """Add the choice ``deft``; change nothing in a server that does not ask for it.

    A failure here costs one line in the log.
    """
    try:
        _register()
    except Exception as error:
        logger.warning("deft: the plugin is not available in this server: %r", error)


def _register() -> None:
    from deft_patches.sglang import backend_names, resolve_arguments

    method = versions.resolving_method()
    if method is None:
        logger.warning("deft: this SGLang resolves its arguments in no known way; not registered")
        return
    # Install the hook first: without it, the name would reach host code that does not know it.
    resolve_arguments.install(method, arguments.resolve)
    versions.add_backend_name(arguments.NAME)
    surround_backends()
    # Look once more after all plugins are loaded: some register after ours.
    backend_names.install(versions.names_function(), surround_backends)

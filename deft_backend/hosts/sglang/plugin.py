"""Entry point of SGLang's plugin group: runs in every process of every server on the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deft_backend.hosts.limits import observing
from deft_backend.hosts.sglang import arguments

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
    from sglang.srt.layers.attention import attention_registry as registry

    from deft_backend.patches import sglang_resolve_arguments

    if sglang_resolve_arguments.method() is None:
        logger.warning("deft: this SGLang resolves its arguments in no known way; not registered")
        return
    # The hook first: without it the name would reach code of the host that does not know it.
    sglang_resolve_arguments.install(arguments.resolve)
    if arguments.NAME not in host.ATTENTION_BACKEND_CHOICES:
        host.ATTENTION_BACKEND_CHOICES.append(arguments.NAME)
    for name, create in list(registry.ATTENTION_BACKENDS.items()):
        registry.register_attention_backend(name)(_around(name, create))
    if observing():
        from deft_backend.hosts.sglang import observe

        observe.install()


def _around(name: str, create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The host's factory of a backend; ours goes around it where arguments.resolve said so."""

    def create_backend(runner: Any) -> Any:
        backend = create(runner)
        if getattr(runner.server_args, arguments.HOST_DECODE, None) != name:
            return backend
        try:
            from deft_backend.hosts.sglang.factory import wrap_backend

            return wrap_backend(runner, name, backend)
        except Exception as error:
            logger.warning(
                "deft: tree attention could not be set up (%r); all attention runs through the "
                "host's own backend (%s)", error, name,
            )  # fmt: skip
            logger.debug("deft: set-up failed", exc_info=True)
            return backend

    return create_backend

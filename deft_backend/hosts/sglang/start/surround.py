"""Put tree attention around each attention backend in the host's registry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deft_backend.hosts.common.limits import observing
from deft_backend.hosts.sglang.start.arguments import HOST_DECODE, NAME

logger = logging.getLogger("deft_backend")

_MARK = "deft_surrounds"


def surround_backends() -> None:
    """Surround every backend that is registered so far, each one once."""
    from sglang.srt.layers.attention import attention_registry as registry

    for name, create in list(registry.ATTENTION_BACKENDS.items()):
        if name != NAME and not hasattr(create, _MARK):
            registry.register_attention_backend(name)(_around(name, create))
    registry.register_attention_backend(NAME)(_unresolved)


def _around(name: str, create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The host's factory of a backend, with tree attention around it for marked arguments."""

    def create_backend(runner: Any) -> Any:
        backend = create(runner)
        decode = getattr(runner.server_args, HOST_DECODE, None)
        if decode is None and observing():  # a server without tree attention
            from deft_backend.hosts.sglang.report import observe

            observe.install()
        if decode != name:
            return backend
        try:
            from deft_backend.hosts.sglang.start.factory import wrap_backend
        except Exception as error:  # on every rank: they run the same code
            logger.warning(
                "deft: tree attention could not be loaded (%r); all attention runs through the "
                "host's own backend (%s)", error, name,
            )  # fmt: skip
            return backend
        return wrap_backend(runner, name, backend)

    setattr(create_backend, _MARK, create)
    return create_backend


def _unresolved(runner: Any) -> Any:
    """Refuse arguments that the host resolved before it loaded the plugin."""
    raise ValueError(
        "attention_backend is 'deft', but these ServerArgs were made before SGLang loaded its "
        "plugins. Call sglang.srt.plugins.load_plugins() first, or let launch_server or Engine "
        "make them"
    )

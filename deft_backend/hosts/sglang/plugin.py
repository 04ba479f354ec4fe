"""Entry point of SGLang's plugin group: runs in every process of every server on the machine."""

import logging
from collections.abc import Callable
from typing import Any

from deft_backend.hosts.sglang import arguments, versions

logger = logging.getLogger("deft_backend")


def register() -> None:
    """Add the choice ``deft``; change nothing in a server that does not ask for it."""
    try:
        _register()
    except Exception as error:
        logger.warning(
            "deft: the plugin could not be registered (%r); this server runs without tree "
            "attention. Run `deft doctor`",
            error,
        )


def _register() -> None:
    from deft_patches.sglang import server_arguments

    # Install the hook first: without it, the name would reach host code that does not know it.
    server_arguments.install(versions.resolving_method(), arguments.resolve)
    for name in (arguments.NAME, arguments.NAME.upper()):
        versions.add_backend_name(name)
    surround_backends()


def surround_backends() -> None:
    from sglang.srt.layers.attention import attention_registry as registry

    for name, create in list(registry.ATTENTION_BACKENDS.items()):
        if not hasattr(create, arguments.SURROUNDED):
            registry.register_attention_backend(name)(_around(name, create))
    for name in (arguments.NAME, arguments.NAME.upper()):
        registry.register_attention_backend(name)(_unresolved)


def _around(name: str, create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The host's factory of a backend, with tree attention around it for marked arguments."""

    def create_backend(runner: Any) -> Any:
        backend = create(runner)
        if getattr(runner.server_args, arguments.HOST_DECODE, None) != name:
            return backend
        try:
            from deft_backend.hosts.sglang.factory import wrap_backend
        except Exception as error:  # on every rank: they run the same code
            logger.warning(
                "deft: tree attention could not be loaded (%r); all attention runs through the "
                "host's own backend (%s). Run `deft doctor`",
                error,
                name,
            )
            return backend
        return wrap_backend(runner, name, backend)

    setattr(create_backend, arguments.SURROUNDED, create)
    return create_backend


def _unresolved(runner: Any) -> Any:
    """Refuse arguments that the host resolved before it loaded the plugin."""
    raise ValueError(
        "attention_backend is 'deft', but these ServerArgs were made before SGLang loaded its "
        "plugins. Call sglang.srt.plugins.load_plugins() first, or let launch_server or Engine "
        "make them"
    )

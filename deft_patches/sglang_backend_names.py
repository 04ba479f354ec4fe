"""Know when the host is about to build its attention backends, in whatever process that is.

Changes: ``ServerArgs.get_attention_backends`` (SGLang 0.5.17 and later): a callback is called with
    the arguments before it; what it returns is not touched.
Why: the host builds backends by the names that this method tells, in processes that unpickle
    resolved arguments. By then every plugin is loaded and its hooks are in place; when ours is
    loaded, plugins that come after it have neither registered backends nor put hooks in place.
Looks for: that method.
Harmless: a callback that fails costs a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.server_args.ServerArgs.get_attention_backends"


def missing() -> str | None:
    """What the host lacks, in one line, or None."""
    from sglang.srt.server_args import ServerArgs

    if not hasattr(ServerArgs, "get_attention_backends"):
        return "ServerArgs has no get_attention_backends"
    return None


def install(callback: Callable[[Any], None]) -> None:
    """Call `callback` with the arguments whenever the backends' names are asked for."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            callback(server_args)
        except Exception as error:
            logger.warning("deft: backends could not be looked at before they are built: %r", error)
        return original(server_args, *args, **kwargs)

    HookRegistry.register(TARGET, around, HookType.AROUND)

"""Know when the host is about to build its attention backends, in whatever process that is.

Changes: the function that the host asks for its backends' names (SGLang 0.5.17:
    ``ServerArgs.get_attention_backends``; from 0.5.18: ``runtime_context.attention_backends``). A
    callback runs before it. What it returns stays as it is.
Why: by then every plugin is loaded. When our plugin is loaded, plugins that come after it have not
    registered their backends yet.
Looks for: nothing; the adapter names the function.
Harmless: a callback that fails costs a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def install(target: str, callback: Callable[[], None]) -> None:
    """Call `callback` whenever the host asks `target`, a dotted name, for its backends' names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            callback()
        except Exception as error:
            logger.warning("deft: backends could not be looked at before they are built: %r", error)
        return original(*args, **kwargs)

    HookRegistry.register(target, around, HookType.AROUND)

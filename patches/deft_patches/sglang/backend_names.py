"""Call back right before the host builds its attention backends, in any process.

Changes: the function that gives the host its backends' names (SGLang 0.5.17:
    ``ServerArgs.get_attention_backends``; from 0.5.18: ``runtime_context.attention_backends``). A
    callback runs before the function. The function's result is unchanged.
Why: at that moment every plugin is loaded. When our plugin is loaded, later plugins have not
registered their backends yet. Looks for: nothing; the adapter names the function. Harmless: if a
callback fails, only a line in the log results.
"""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def install(target: str, callback: Callable[[], None]) -> None:
    """Call `callback` whenever the host calls `target`, a dotted name, for its backends' names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            callback()
        except Exception as error:
            logger.warning(
                "deft: backends of other plugins cannot be prepared (%r); a server that uses one "
                "runs without tree attention",
                error,
            )
        return original(*args, **kwargs)

    HookRegistry.register(target, around, HookType.AROUND)

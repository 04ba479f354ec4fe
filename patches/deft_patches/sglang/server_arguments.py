"""Let the host resolve its arguments as if ``--attention-backend deft`` had not been passed.

Changes: wraps the method of ``ServerArgs`` that resolves a configuration (``__post_init__``, from
    SGLang 0.5.19 ``resolve_once``), and the function that gives the host its backends' names
    (``ServerArgs.get_attention_backends``, from 0.5.18 ``runtime_context.attention_backends``): a
    callback runs before it.
Why: the host derives much from the attention backend's name, in dozens of places: page size, KV
    dtype, graphs, which kernels write its page tables. Its registry adds names, but no way to say
    "like your default, except decode". The first wrapper removes the name before;
    ``hosts/sglang/arguments.py`` describes what follows. The second runs when every plugin is
    loaded: plugins after ours register their backends later than we look.
Looks for: nothing; the adapter names method and function.
Harmless to servers that do not ask for ``deft``: the wrappers call the host's own. If the callback
    fails, only a line in the log results.
"""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Resolve = Callable[..., Any]  # the host's method: takes the arguments object


def install(method: str, around: Callable[[Resolve, Any], Any]) -> None:
    """Call ``around(resolve, server_args)`` in the place of a method of ``ServerArgs``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.server_args.ServerArgs.{method}", around, HookType.AROUND)


def before_backends(target: str, callback: Callable[[], None]) -> None:
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

"""Let the host resolve its arguments as if ``--attention-backend deft`` had not been passed.

Changes: wraps the method of ``ServerArgs`` that resolves a configuration: ``__post_init__``, from
    SGLang 0.5.19 ``resolve_once``.
Why: the host derives much from the attention backend's name, in dozens of places: page size, KV
    dtype, graphs, which kernels write its page tables. Its registry adds names, but no way to say
    "like your default, except decode". The wrapper removes the name before;
    ``hosts/sglang/arguments.py`` describes what follows.
Harmless to servers that do not ask for ``deft``: the wrapper calls the host's own.
"""

from collections.abc import Callable
from typing import Any

Resolve = Callable[..., Any]  # the host's method: takes the arguments object


def install(method: str, around: Callable[[Resolve, Any], Any]) -> None:
    """Call ``around(resolve, server_args)`` in the place of a method of ``ServerArgs``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.server_args.ServerArgs.{method}", around, HookType.AROUND)

"""Let the host resolve its arguments as if ``--attention-backend deft`` had not been passed.

Changes: wraps the method of ``ServerArgs`` that resolves a configuration: ``__post_init__``
    (SGLang 0.5.17) or ``resolve_once`` (0.5.23), whichever the host has.
Why: the host derives much from the attention backend's name, in dozens of places: page size, KV
    dtype, graphs, which kernels write its page tables (on the CPU it would launch Triton kernels
    for an unknown name). Its registry adds names, but no way to say "like your default, except
    decode". The wrapper takes the name out before; ``hosts/sglang/arguments.py`` says what then.
Looks for: that method, ``get_attention_backends`` and ``cuda_graph_config``.
Harmless to servers that do not ask for ``deft``: the wrapper calls straight through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.server_args.ServerArgs"

Resolve = Callable[..., Any]
"""The host's method: takes the arguments object."""


def method() -> str | None:
    """Name of the method in which the host resolves its arguments, or None."""
    from sglang.srt.server_args import ServerArgs

    for name in ("resolve_once", "__post_init__"):
        if callable(getattr(ServerArgs, name, None)):
            return name
    return None


def missing() -> str | None:
    """What the host lacks for tree attention to be chosen after resolution, or None."""
    from sglang.srt.server_args import ServerArgs

    found = method()
    if found != "__post_init__":
        return f"ServerArgs resolves in {found or 'no known method'}, not in __post_init__"
    for name in ("get_attention_backends", "cuda_graph_config"):
        if not hasattr(ServerArgs, name):
            return f"ServerArgs has no {name}"
    return None


def install(around: Callable[[Resolve, Any], Any]) -> None:
    """Call ``around(resolve, server_args)`` in place of the host's method."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    name = method()
    if name is None:
        raise RuntimeError("ServerArgs resolves in no known method; see missing()")
    HookRegistry.register(f"{TARGET}.{name}", around, HookType.AROUND)

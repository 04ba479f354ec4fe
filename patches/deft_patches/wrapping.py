"""Put a function around a method of the host, even if other plugins have wrapped the method.

Also the host's class of runners that capture and replay decode CUDA graphs, whose methods two
patches wrap.

The host's own registry of hooks reads each method once, when the host loads plugins: a later hook
of a method that another plugin has hooked would silently have no effect.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_HOOK = "deft_hook"


def wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
    """Call ``hook(original, ...)`` instead of a method or class method; wraps it only once.

    `hook` gets the original method and its arguments, the instance or class first.
    """
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod) else found
    if is_wrapped(owner, name, hook):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(wrapper, _HOOK, hook)
    setattr(owner, name, classmethod(wrapper) if isinstance(found, classmethod) else wrapper)


def is_wrapped(owner: type, name: str, hook: Callable[..., Any]) -> bool:
    """Whether `hook` is around the method, also if other plugins' wrappers are around `hook`."""
    method = getattr(owner, name, None)
    method = getattr(method, "__func__", method)
    while method is not None:
        # Read its own dictionary: functools.wraps copies attributes to the wrappers around it.
        if getattr(method, "__dict__", {}).get(_HOOK) is hook:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def graph_runner(model_runner: Any) -> type:
    """The class that captures and replays a model runner's decode graphs."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    # Model runners of other packages choose their own class in this method.
    choose = getattr(model_runner, "_decode_cuda_graph_runner_cls", None)
    owner: type = DecodeCudaGraphRunner if choose is None else choose()
    return owner

"""Put a function around a method of the host, even if other plugins have wrapped the method.

Also the host's class of runners that capture and replay decode CUDA graphs, whose methods two
patches wrap.

The host's own registry of hooks reads each method once, when the host loads plugins: a later hook
of a method that another plugin has hooked would silently have no effect.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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


def lacking(owner: type, expected: Mapping[str, Sequence[str]]) -> str | None:
    """What a class lacks of these methods with these first parameters, in one line; or None."""
    for name, parameters in expected.items():
        method = getattr(owner, name, None)
        if method is None:
            return f"{owner.__name__} has no {name}"
        takes = list(inspect.signature(inspect.unwrap(method)).parameters)
        if takes[: len(parameters)] != list(parameters):
            return f"{name} of {owner.__name__} takes {takes}, not {list(parameters)} first"
    return None


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


def checked_graph_runner(model_runner: Any, expected: Mapping[str, Sequence[str]]) -> type:
    """The class of a model runner's graph runner.

    Raises RuntimeError if the host has no such class, or it lacks methods with these first
    parameters.
    """
    try:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    except ImportError:
        raise RuntimeError("there is no DecodeCudaGraphRunner") from None
    # Model runners of other packages choose their own class in this method.
    choose = getattr(model_runner, "_decode_cuda_graph_runner_cls", None)
    owner: type = DecodeCudaGraphRunner if choose is None else choose()
    reason = lacking(owner, expected)
    if reason is not None:
        raise RuntimeError(reason)
    return owner

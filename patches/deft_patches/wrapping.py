"""Put a function around a method of the host, even if other plugins have wrapped the method.

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

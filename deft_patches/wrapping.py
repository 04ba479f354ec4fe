"""Put a function around a method of the host's, whatever other plugins have done to it.

The host's own registry of hooks looks at each method once, when plugins are loaded. What is
installed later, for a model runner, would silently not be there if another plugin had hooked the
same method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_HOOK = "deft_hook"


def wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
    """Call ``hook(original, ...)`` in the place of a method or class method; once, if asked again.

    Parameters
    ----------
    owner : type
    name : str
        Of its method.
    hook : callable
        Takes the original and what that was called with, the instance or class first.
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
    """Whether `hook` is around the method, be it under other plugins' wrappers."""
    method = getattr(owner, name, None)
    method = getattr(method, "__func__", method)
    while method is not None:
        # In its own dictionary: functools.wraps copies attributes to wrappers around it.
        if getattr(method, "__dict__", {}).get(_HOOK) is hook:
            return True
        method = getattr(method, "__wrapped__", None)
    return False

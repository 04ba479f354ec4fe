"""A second copy of a kernel's module, whose functions run in Triton's interpreter.

Triton decides once, when a function is decorated, whether it is compiled or interpreted, for the
whole process. The same process here may serve a model on the CPU and test compiled kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from types import ModuleType

from triton import knobs


@lru_cache
def interpreted_copy(module: ModuleType) -> ModuleType:
    """Execute `module`'s source again with Triton's interpreter on."""
    name = f"{module.__name__}_interpreted"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    compiled = knobs.runtime.interpret
    knobs.runtime.interpret = True
    try:
        spec.loader.exec_module(copy)
    finally:
        knobs.runtime.interpret = compiled
    return copy

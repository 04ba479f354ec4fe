"""`host_jit`: Numba for loops on the CPU, with a disk cache that cannot fail.

Numba keeps compiled code on disk next to the source, or in the user's cache folder if the package
is installed read-only. `host_jit` differs from it in three ways. If no folder can be written, or
the disk is full, it compiles in every process; Numba raises an error. It recompiles a function also
when another file changes whose functions or constants it may use. It keeps a folder for each
version of Numba, because several environments may use one checkout.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching

from deft_backend.compile.clock import COMPILING
from deft_backend.compile.source_digest import digest_of

F = TypeVar("F", bound=Callable[..., Any])

LAYERS = ("forest", "shapes/kernel_limits.py", "policies", "planner")
"""Sources of compiled code. The code of each layer uses functions and constants of its own layer
and of earlier layers."""


def host_jit(function: F) -> F:
    """Compile a function of scalars and NumPy arrays for the CPU; it releases the GIL.

    The first call with new argument types compiles: in seconds, or in milliseconds from the cache.
    ``warm_up`` functions make those calls before the first request.
    """
    dispatcher = numba.njit(nogil=True)(function)
    if hasattr(dispatcher, "py_func"):  # under NUMBA_DISABLE_JIT it is a plain function
        # Without a folder that can be written (or a source file), every process compiles.
        with contextlib.suppress(Exception):
            dispatcher._cache = _BestEffortCache(function)
        dispatcher.compile = _timed(dispatcher.compile)
    return cast(F, dispatcher)


@contextmanager
def not_compiled() -> Iterator[None]:
    """Leave functions of modules that are imported in the ``with`` block to Python.

    A few small plans take Python less time than Numba takes to compile the host planner.
    """
    before = numba.config.DISABLE_JIT
    numba.config.DISABLE_JIT = True
    try:
        yield
    finally:
        numba.config.DISABLE_JIT = before


def _timed(compile_for: F) -> F:
    """The same method of a dispatcher; the package's clock runs while it compiles or loads."""

    @wraps(compile_for)
    def timed(signature: Any) -> Any:
        with COMPILING.running():
            return compile_for(signature)

    return cast(F, timed)


@lru_cache
def sources_digest(module: str) -> str:
    """Digest of the package's sources that code compiled in `module` may depend on."""
    folder = module.partition(".")[2].partition(".")[0]
    if folder in LAYERS:
        return digest_of(LAYERS[: LAYERS.index(folder) + 1])
    return digest_of(["."])


class _BestEffortCache(caching.FunctionCache):  # type: ignore[misc]
    """Numba's cache on disk; a failure of the cache never reaches the caller."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        locator = self._impl.locator
        self._folder = Path(self._cache_path) / f"numba-{numba.__version__}"
        self._cache_file = caching.IndexDataCacheFile(
            cache_path=str(self._folder),
            filename_base=self._impl.filename_base,
            source_stamp=(locator.get_source_stamp(), sources_digest(function.__module__)),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            code = super().load_overload(sig, target_context)
            # Two processes that write the index at the same time can mix up its entries.
            return code if code is not None and tuple(code.signature.args) == sig else None
        except Exception:  # unreadable or damaged: compile
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            super().save_overload(sig, data)
        except Exception:  # full, read-only, gone: the code in memory is fine
            self.disable()

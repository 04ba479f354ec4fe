"""`host_jit`: Numba for loops on the CPU, with a disk cache that cannot fail.

Numba keeps compiled code on disk next to the source, or in the user's cache folder if the package
is installed read-only. `host_jit` differs from it in three ways. If no folder can be written, or
the disk is full, it compiles in every process; Numba raises an error. It recompiles a function also
when another file changes whose functions or constants it may use. It keeps a folder for each
version of Numba, because several environments may use one checkout.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching
from numba.core.dispatcher import Dispatcher

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


@dataclass(frozen=True)
class HostCall:
    """A compiled function that Python calls, and the types of the arguments."""

    function: Any
    types: tuple[Any, ...]

    def compile(self) -> None:
        """Compile the function for these types into the cache on disk, or take it from there."""
        self.function.compile(self.types)


@contextmanager
def calls_in_python() -> Iterator[dict[HostCall, None]]:
    """Run the package's compiled functions in Python in the ``with`` block; nothing compiles.

    Yields the calls of functions that no other of them called, in the order of the first calls.
    """
    calls: dict[HostCall, None] = {}
    running = False

    def in_python(function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal running
            before, running = running, True
            if not before:
                types = tuple(map(function.typeof_pyval, arguments))
                calls[HostCall(function, types)] = None
            try:
                return function.py_func(*arguments)
            finally:
                running = before

        return call

    places = [
        (vars(module), name, value)
        for path, module in list(sys.modules.items())
        if path.partition(".")[0] == __name__.partition(".")[0]
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
    ]
    for module, name, function in places:
        module[name] = in_python(function)
    try:
        yield calls
    finally:
        for module, name, function in places:
            module[name] = function


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

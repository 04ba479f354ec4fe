"""Gluon, Triton's experimental language: all that differs between the supported versions of Triton.
Kernels import the language from here.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import triton

__all__ = [
    "EQUAL_BITS",
    "VERSIONS",
    "async_load",
    "available",
    "barrier",
    "commit_group",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "jit",
    "mma_v2",
    "reinterpret",
    "small_tile_limits",
    "wait_group",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

logger = logging.getLogger(__name__)

VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Triton releases, major and minor, whose Gluon the kernels are tested with."""

EQUAL_BITS = ("3.6.", "3.8.")
"""Releases under which the ordered tile had the large tile's bits on a GPU (docs/results)."""

try:
    from triton.experimental.gluon import constexpr_function, jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    # Triton 3.7 renamed the barrier of all threads of a program.
    barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
    # Triton 3.8 renamed the copy from global to shared memory; 3.9 dropped its old name.
    async_load: Any = (
        getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
    )
    # Triton 3.9 made this method of shared memory public.
    _PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
    _IMPORT_ERROR = ""
except (ImportError, AttributeError) as error:
    _IMPORT_ERROR = f"{error!r}"
    gl = barrier = async_load = commit_group = wait_group = None
    mma_v2 = fence_async_shared = warpgroup_mma = warpgroup_mma_wait = None

    def jit(function: Any) -> Any:
        """Return a kernel as it is, because this Triton cannot compile it."""
        return function

    constexpr_function = jit


@jit
def reinterpret(buffer, dtype, shape, layout):
    """Return shared memory as a buffer of another element type, shape and layout."""
    if _PUBLIC:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@cache
def available() -> bool:
    """Whether this Triton can compile the Gluon kernels; if not, the log says once what runs."""
    reason = _IMPORT_ERROR and f"it has no usable Gluon: {_IMPORT_ERROR}"
    if not triton.__version__.startswith(tuple(f"{major}.{minor}." for major, minor in VERSIONS)):
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        reason = f"it is not one of the tested versions {known}"
    if not reason:
        return True
    logger.warning(
        "deft: Triton %s: %s; stage 1 runs the plain Triton kernels, which are slower on Hopper. "
        "Install Triton %d.%d to %d.%d to use the Hopper kernels",
        triton.__version__,
        reason,
        *VERSIONS[0],
        *VERSIONS[-1],
    )
    return False


def small_tile_limits(gqa_group: int) -> tuple[int, int]:
    """Programs on an SM and registers of a thread for the Hopper kernel of small tiles.

    A quarter of an SM has 16,384 registers. It holds two programs of up to 248 registers a thread,
    or three of up to 168. Next to one program of the large tile it holds two of up to 128. Tests
    compile the kernel and check that it needs no stack within these limits. At most 8 query heads
    share a KV head. With no limit, Triton 3.6 takes 168 registers for one head: room for more
    programs than are launched.
    """
    before_3_8 = triton.__version__.startswith(("3.6.", "3.7."))
    if gqa_group in (2, 4):
        # Triton 3.9 orders the loads of a merge differently: they do not fit 128 registers.
        return 10, 168 if triton.__version__.startswith("3.9.") else 128
    if gqa_group == 8 or (gqa_group > 4 and before_3_8):
        return 10, 168
    return 8, 248

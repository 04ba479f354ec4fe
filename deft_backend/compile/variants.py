"""Variants of Triton kernels: found without running them, compiled side by side.

Triton compiles a kernel once for each variant: its constants and options, the types of its
arguments, and whether an integer is 1 or a pointer or integer is a multiple of 16. `recorded`
collects the variants of launches that run nothing. `compile_all` compiles them on several threads,
along the code path of Triton's own launch: so each gets the key that a launch looks up in Triton's
cache. `compiling_for` needs no GPU.
"""

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from deft_backend.compile.clock import COMPILING
from deft_backend.compile.kernel_folder import SharedCache

logger = logging.getLogger(__name__)

MOST_THREADS = 32
"""More do not help: a tenth of the time is Triton's Python, which one thread runs at a time."""

recorder: Callable[[Any, Sequence[Any], Mapping[str, Any], Mapping[str, Any]], None] | None = None
"""Takes each launch while :func:`recorded` records: kernel, arguments, constants, options."""


@dataclass(frozen=True)
class Pointer:
    """A tensor as Triton looks at it."""

    dtype: Any
    aligned: bool

    def data_ptr(self) -> int:
        """An address that is a multiple of 16 bytes, or is not."""
        return 0 if self.aligned else 8


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that decides how it is compiled."""

    kernel: Any
    # One of each kind for each argument: a :class:`Pointer`, a float, or an integer of the
    # argument's kind (1, a multiple of 16, or another); or a tuple of them.
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self) -> Any:
        """Compile it for Triton's current GPU, or take it from Triton's cache."""
        return self.kernel.warmup(
            *self.arguments, grid=(1, 1, 1), **dict(self.constants), **dict(self.options)
        )

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@contextmanager
def recorded() -> Iterator[dict[Variant, None]]:
    """Record the variants of all launches in the ``with`` block, which run nothing."""
    global recorder
    variants: dict[Variant, None] = {}

    def record(
        kernel: Any,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        parameters = [p for p in kernel.params if p.name not in constants]
        seen = tuple(
            _kind(value, fixed=parameter.do_not_specialize)
            for value, parameter in zip(arguments, parameters, strict=True)
        )
        variants[Variant(kernel, seen, tuple(constants.items()), tuple(options.items()))] = None

    before, recorder = recorder, record
    try:
        yield variants
    finally:
        recorder = before


def _kind(value: Any, *, fixed: bool) -> Any:
    """A stand-in for all arguments for which Triton compiles the same code."""
    if isinstance(value, tuple):
        # Triton compiles for the integers in a structure, whatever `do_not_specialize` says.
        parts = [_kind(part, fixed=False) for part in value]
        return type(value)._make(parts) if hasattr(value, "_make") else tuple(parts)
    if hasattr(value, "data_ptr"):
        return Pointer(value.dtype, value.data_ptr() % 16 == 0)
    if isinstance(value, float):
        return 0.5
    beyond = 0 if -(1 << 31) <= value < 1 << 31 else 1 << 32  # Triton passes it as 64 bits
    if fixed:
        return beyond + 2
    return 1 if value == 1 else beyond + (16 if value % 16 == 0 else 2)


@dataclass(frozen=True)
class Compiled:
    """What :func:`compile_all` did."""

    kernels: tuple[Any, ...]  # Triton's compiled kernels, in the order of the variants
    # How many kernels were compiled, and how many came from Triton's cache.
    compiled: int
    cached: int
    seconds: float
    threads: int

    def __str__(self) -> str:
        return (
            f"{len(self.kernels)} kernels ready in {self.seconds:.1f} s: {self.compiled} compiled "
            f"on {self.threads} threads, {self.cached} from the cache"
        )


def compile_all(
    variants: Iterable[Variant],
    *,
    threads: int | None = None,
    prepare: Callable[[], None] | None = None,
    load: bool = False,
    shared: SharedCache | None = None,
) -> Compiled:
    """Compile the kernels that Triton's cache lacks, several at the same time.

    - `variants`: sorted by compile time, longest first, if that order is known.
    - `prepare`: called in each thread before it compiles, to select the thread's GPU.
    - `load`: whether each kernel is also loaded onto the GPU.
    - `shared`: a cache that other processes fill at the same time: what they compile is taken.

    Raises the first exception that a compilation raised.
    """
    wanted = list(variants)
    threads = _threads_for(wanted, threads)
    began = time.perf_counter()

    def make(variant: Variant, *, wait: bool) -> Any:
        turn = nullcontext(True) if shared is None else shared.lock(repr(variant), wait=wait)
        with turn as mine:
            if not mine and not wait:
                return None
            kernel = _compiled(variant)
            if load:
                kernel[(1, 1, 1)]  # loads it; nothing runs
            return kernel

    with (
        COMPILING.running(),
        _no_collections(),
        _compilations({variant.kernel for variant in wanted}) as hits,
        ThreadPoolExecutor(threads, initializer=prepare) as pool,
    ):
        made = dict(zip(wanted, pool.map(partial(make, wait=False), wanted), strict=True))
        left = [variant for variant, kernel in made.items() if kernel is None]
        made.update(zip(left, pool.map(partial(make, wait=True), left), strict=True))
        kernels = tuple(made[variant] for variant in wanted)
    # Triton 3.6 compiles launchers as modules of one name, and loading one again changes the one
    # before. So of two threads, one may have taken the other's launcher: make them anew, in turn.
    for kernel in kernels if load else ():
        kernel._run = driver.active.launcher_cls(kernel.src, kernel.metadata)
    compiled = hits.count(False)
    return Compiled(kernels, compiled, len(wanted) - compiled, time.perf_counter() - began, threads)


@contextmanager
def compiled_meanwhile(
    variants: Iterable[Variant], prepare: Callable[[], None]
) -> Iterator[dict[Variant, Future[Any]]]:
    """Compile kernels on threads while the ``with`` block runs; those first in order begin first.

    `prepare` is as for :func:`compile_all`. A compilation that has not begun at the end never does.
    """
    wanted = list(variants)
    with ThreadPoolExecutor(_threads_for(wanted), initializer=prepare) as pool:
        try:
            yield {variant: pool.submit(_compiled, variant) for variant in wanted}
        finally:
            pool.shutdown(cancel_futures=True)


def _threads_for(variants: Sequence[Variant], threads: int | None = None) -> int:
    """How many threads compile variants; makes what two of them must not make at once."""
    if variants:
        device = driver.active.get_current_device()
        for variant in variants:
            _ = variant.kernel.device_caches[device]
    return max(1, min(threads or usable_cpus(), MOST_THREADS, len(variants)))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector from calling Python while threads parse: see :func:`_compiled`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compiled(variant: Variant) -> Any:
    """Compile a variant; try again after a SystemError of Python itself.

    Python 3.11 counts the depth of a syntax tree for all threads together. So ``ast.parse``, which
    Triton calls, can raise a SystemError if two threads parse at the same time: above all when the
    garbage collector calls Python (`gc.callbacks`) during one's.
    """
    for _ in range(20):
        try:
            return variant.compile()
        except Exception as error:
            if not _caused_by_python(error):
                raise
            logger.debug("deft: compiling again after %r", error)
    return variant.compile()


def _caused_by_python(error: BaseException | None) -> bool:
    """Whether an error is a SystemError or follows from one: Triton wraps it in its own error."""
    while error is not None and not isinstance(error, SystemError):
        error = error.__cause__ or error.__context__
    return error is not None


class _Driver:
    """Answers what Triton asks before it compiles. Nothing can be loaded or launched."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> object:
        """The key under which a kernel keeps compiled code in memory: each driver has its own."""
        return self

    def get_current_stream(self, device: object) -> int:
        """Asked before every launch, real or not."""
        return 0


@contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """Let Triton compile for NVIDIA GPUs of an architecture, such as 90, in the ``with`` block."""
    before = getattr(driver, "_active", None)
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        driver.set_active(before)


@contextmanager
def _compilations(kernels: Iterable[Any]) -> Iterator[list[bool]]:
    """Whether Triton's cache held each compilation of some kernels in the ``with`` block."""
    chosen = {id(kernel) for kernel in kernels}
    hits: list[bool] = []
    before = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if id(getattr(event["src"], "fn", None)) in chosen:
            hits.append(bool(event["cache_hit"]))
        if before is not None:
            before(**event)

    knobs.compilation.listener = listen
    try:
        yield hits
    finally:
        knobs.compilation.listener = before


@contextmanager
def reported_late(kernel: Any) -> Iterator[None]:
    """Log a kernel that a launch compiles: a server should have compiled it when it started."""
    began = time.perf_counter()
    with COMPILING.running(), _compilations([kernel]) as hits:
        yield
    if False in hits:
        logger.info(
            "deft: compiled the kernel %s at its first launch, in %.1f s",
            kernel.fn.__name__,
            time.perf_counter() - began,
        )


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may keep busy: at least 1, and a part of a CPU counts as one.

    `root` holds ``proc`` and ``sys``. A file that cannot be read sets no limit. Source: cgroups(7).
    """
    cpus = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min([cpus, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """The CPUs that each control group of this process may use, for groups of both versions."""
    groups = []
    with suppress(OSError):
        # A group's name may be any bytes.
        groups = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    for group in groups:
        _, controllers, path = [*group.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # In a container the mount may be the process's own group, while `path` is the machine's.
        folder = mount / path.lstrip("/")
        for each in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # ValueError: "max"
                quota, period = (
                    int(word) for name in names for word in (each / name).read_text().split()
                )
                if quota > 0:  # -1: no quota
                    yield quota / period
            if each == mount:
                break

"""Compile kernels in processes of their own, into the Triton cache that this process launches from.

A third of a compilation is Triton's Python, and threads of one process run Python in turns. This
is for commands: a server that has started threads must not fork.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from deft_backend.compile.variants import MOST_THREADS, Variant, compiling_for, usable_cpus

logger = logging.getLogger(__name__)

_given: tuple[Sequence[Variant], int] = ((), 0)
"""Of a compiling process: the variants and their architecture."""


@contextmanager
def compiled_in_processes(
    variants: Collection[Variant], arch: int, until: float
) -> Iterator[Callable[[Iterable[Variant]], bool]]:
    """Compile variants for NVIDIA GPUs of an architecture while the ``with`` block runs.

    Yields a function that waits for some of the variants; it tells whether they were ready before
    `until`, by the monotonic clock. A variant that does not compile is ready too: its launch raises
    the error. Processes that still compile at the end of the block are stopped. Without processes,
    all variants are ready at once: their launches compile them.
    """
    wanted = list(variants)
    processes = max(1, min(usable_cpus(), MOST_THREADS, len(wanted)))
    fork = multiprocessing.get_context("fork")  # a new interpreter would import torch for seconds
    try:
        pool = fork.Pool(processes, _begin, (wanted, arch))
    except (OSError, RuntimeError) as error:  # few pids, little memory, or no /dev/shm
        logger.warning("deft: kernels compile in this process; no others can start: %s", error)
        yield lambda needed: True
        return
    with pool:
        results = {v: pool.apply_async(_compile, (at,)) for at, v in enumerate(wanted)}

        def ready(needed: Iterable[Variant]) -> bool:
            for variant in needed:
                results[variant].wait(max(0.0, until - time.monotonic()))
            return all(results[variant].ready() for variant in needed)

        yield ready


def _begin(variants: Sequence[Variant], arch: int) -> None:
    """Begin a compiling process. It never calls CUDA, whose state does not survive a fork."""
    global _given
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends this
    os.nice(5)  # the command runs what is compiled while this compiles more
    _given = variants, arch


def _compile(at: int) -> None:
    variants, arch = _given
    with contextlib.suppress(Exception), compiling_for(arch):
        kernel = variants[at].compile()
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)  # Triton 3.6 compiles this as well, from C

"""Compile kernels in processes of their own, into the Triton cache that this process launches from.

A third of a compilation is Triton's Python, and threads of one process run Python in turns. This
is for commands: a server that has started threads must not fork.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from deft_backend.compile.usable_cpus import usable_cpus
from deft_backend.compile.variants import MOST_THREADS, Variant, compiling_for

logger = logging.getLogger(__name__)

_BYTES = 4  # of a variant's number in a pipe


@contextmanager
def compiled_in_processes(
    variants: Collection[Variant], arch: int, until: float
) -> Iterator[Callable[[Iterable[Variant]], bool]]:
    """Compile variants for NVIDIA GPUs of an architecture while the ``with`` block runs.

    Yields a function that waits for some of the variants; it tells whether they were ready before
    `until`, by the monotonic clock. A variant that does not compile is ready too: its launch raises
    the error. When the last process has ended, every variant is ready: launches compile the rest.
    Processes that still compile at the end of the block are killed.
    """
    wanted = list(variants)
    places = {variant: at for at, variant in enumerate(wanted)}
    # Two pipes and no lock: a process that is killed would hold a lock for ever.
    todo, give = os.pipe()
    done, tell = os.pipe()
    os.write(give, b"".join(at.to_bytes(_BYTES, "little") for at in range(len(wanted))))
    os.close(give)
    fork = multiprocessing.get_context("fork")  # a new interpreter would import torch for seconds
    started = []
    finished: set[int] = set()

    def ready(needed: Iterable[Variant]) -> bool:
        missing = {places[variant] for variant in needed}
        while missing - finished:
            if not select.select([done], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            told = os.read(done, _BYTES)
            finished.update([int.from_bytes(told, "little")] if told else missing)
        return True

    try:
        try:
            for _ in range(min(usable_cpus(), MOST_THREADS, len(wanted))):
                process = fork.Process(target=_compile, args=(wanted, arch, todo, tell, done))
                process.start()
                started.append(process)
        except OSError as error:  # few processes or little memory are allowed
            logger.warning("deft: kernels compile in %d processes: %s", len(started), error)
        os.close(tell)
        yield ready
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()
        os.close(todo)
        os.close(done)


def _compile(variants: Sequence[Variant], arch: int, todo: int, tell: int, done: int) -> None:
    """Compile variants by their numbers. It never calls CUDA, whose state no fork survives."""
    os.close(done)  # so that `tell` fails if the command has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends this
    os.nice(5)  # the command runs what is compiled while this compiles more
    while number := os.read(todo, _BYTES):
        with contextlib.suppress(Exception), compiling_for(arch):
            kernel = variants[int.from_bytes(number, "little")].compile()
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)  # Triton 3.6 compiles this as well, from C
        try:
            os.write(tell, number)
        except BrokenPipeError:
            return

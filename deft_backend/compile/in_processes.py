"""Compile kernels in processes of their own, into the cache on disk that this process loads from.

Threads run Triton's compiler in turns. For commands only: a server with threads must not fork.
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
from deft_backend.compile.variants import MOST_THREADS, ForArchitecture

logger = logging.getLogger(__name__)

_BYTES = 4  # of a number in a pipe


@contextmanager
def compiled_in_processes(
    kernels: Collection[ForArchitecture],
) -> Iterator[Callable[[Iterable[ForArchitecture], float], bool]]:
    """Compile kernels while the ``with`` block runs; those first in order begin first.

    Yields a function that waits for some of the kernels; it tells whether they were ready before a
    time of the monotonic clock. A kernel that does not compile, or that no process is left for, is
    ready too: its launch compiles it. The end of the block kills processes that still compile.
    """
    wanted = list(kernels)
    places = {kernel: at for at, kernel in enumerate(wanted)}
    # Two pipes and no lock: a process that is killed would hold a lock for ever.
    todo, give = os.pipe()
    done, tell = os.pipe()
    os.write(give, b"".join(at.to_bytes(_BYTES, "little") for at in range(len(wanted))))
    os.close(give)
    fork = multiprocessing.get_context("fork")  # a new interpreter would import torch for seconds
    started = []
    finished: set[int] = set()

    def ready(needed: Iterable[ForArchitecture], until: float) -> bool:
        missing = {places[kernel] for kernel in needed}
        while missing - finished:
            if not select.select([done], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            told = os.read(done, _BYTES)
            finished.update([int.from_bytes(told, "little")] if told else missing)
        return True

    try:
        try:
            for _ in range(min(usable_cpus(), MOST_THREADS, len(wanted))):
                process = fork.Process(target=_compile, args=(wanted, todo, tell, done))
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


def _compile(kernels: Sequence[ForArchitecture], todo: int, tell: int, done: int) -> None:
    """Compile kernels by their numbers, without a call of CUDA: no fork survives it."""
    os.close(done)  # so that `tell` fails if the command has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends this
    os.nice(5)  # the command runs what is compiled while this compiles more
    while number := os.read(todo, _BYTES):
        with contextlib.suppress(Exception):
            kernels[int.from_bytes(number, "little")].compile()
        try:
            os.write(tell, number)
        except BrokenPipeError:
            return

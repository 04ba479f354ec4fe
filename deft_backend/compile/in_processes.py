"""Compile in processes of their own, into the caches on disk that this process takes code from.

Triton's compiler and Numba's run Python, and threads of one process run Python in turns. This is
for commands: a server that has started threads must not fork.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from deft_backend.compile.usable_cpus import usable_cpus
from deft_backend.compile.variants import MOST_THREADS

logger = logging.getLogger(__name__)

_BYTES = 4  # of a number in a pipe


class Code(Hashable, Protocol):
    """What a process compiles into a cache on disk. It must not call CUDA: no fork survives it."""

    def compile(self) -> object: ...


@contextmanager
def compiled_in_processes(
    codes: Collection[Code],
) -> Iterator[Callable[[Iterable[Code], float], bool]]:
    """Compile codes while the ``with`` block runs; those first in order begin first.

    Yields a function that waits for some of the codes; it tells whether they were ready before a
    time of the monotonic clock. A code that does not compile is ready too: its use raises the
    error. When the last process has ended, every code is ready: its use compiles it. Processes that
    still compile at the end of the block are killed.
    """
    wanted = list(codes)
    places = {code: at for at, code in enumerate(wanted)}
    # Two pipes and no lock: a process that is killed would hold a lock for ever.
    todo, give = os.pipe()
    done, tell = os.pipe()
    os.write(give, b"".join(at.to_bytes(_BYTES, "little") for at in range(len(wanted))))
    os.close(give)
    fork = multiprocessing.get_context("fork")  # a new interpreter would import torch for seconds
    started = []
    finished: set[int] = set()

    def ready(needed: Iterable[Code], until: float) -> bool:
        missing = {places[code] for code in needed}
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
            logger.warning("deft: code compiles in %d processes: %s", len(started), error)
        os.close(tell)
        yield ready
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()
        os.close(todo)
        os.close(done)


def _compile(codes: Sequence[Code], todo: int, tell: int, done: int) -> None:
    """Compile codes by their numbers."""
    os.close(done)  # so that `tell` fails if the command has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends this
    os.nice(5)  # the command runs what is compiled while this compiles more
    while number := os.read(todo, _BYTES):
        with contextlib.suppress(Exception):
            codes[int.from_bytes(number, "little")].compile()
        try:
            os.write(tell, number)
        except BrokenPipeError:
            return

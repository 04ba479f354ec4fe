"""How long this process has compiled the package's code: a plan's time does not contain it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class CompileClock:
    """Adds up the time of its ``with`` blocks; one inside another of its thread counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0  # the sum over all threads
        self._thread = threading.local()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        if getattr(self._thread, "runs", False):
            yield
            return
        self._thread.runs = True
        began = time.perf_counter()
        try:
            yield
        finally:
            self._thread.runs = False
            with self._lock:
                self.seconds += time.perf_counter() - began


COMPILING = CompileClock()

"""Turns of several processes on one GPU: they prepare side by side, and each measures alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext


class Turns:
    """A lock that processes share, or one holds alone. Nobody begins to share it while a process
    waits to hold it, so measurements run one after the other.
    """

    def __init__(self, context: BaseContext) -> None:
        self._changed = context.Condition()
        self._sharing = context.Value("i", 0, lock=False)  # processes that share it
        self._waiting = context.Value("i", 0, lock=False)  # processes that wait to hold it
        self._held = context.Value("i", 0, lock=False)  # whether one holds it alone

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._begin_to_share()
        try:
            yield
        finally:
            with self._changed:
                self._sharing.value -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within :meth:`shared`, to which it returns."""
        with self._changed:
            self._sharing.value -= 1
            self._waiting.value += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._sharing.value and not self._held.value)
            self._waiting.value -= 1
            self._held.value = 1
        try:
            yield
        finally:
            with self._changed:
                self._held.value = 0
                self._changed.notify_all()
                self._begin_to_share()

    def _begin_to_share(self) -> None:
        self._changed.wait_for(lambda: not self._waiting.value and not self._held.value)
        self._sharing.value += 1

"""What Ctrl-C does: it ends the process at once, or it unwinds a command."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def leave_at_once() -> None:
    """Let Ctrl-C print one line and end the process, while nothing needs a clean shutdown.

    An exception would not do: extensions that it reaches turn it into other errors.
    """
    # Keep any other handler, such as that of a job in the background, which ignores Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def unwinding() -> Iterator[None]:
    """In this block, Ctrl-C raises KeyboardInterrupt, as Python does by itself."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        leave_at_once()


def _leave(number: int, frame: Any) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)

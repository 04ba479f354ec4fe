"""Locks that processes hold on files; the system releases them when their holder ends."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

with contextlib.suppress(ImportError):  # not on Windows
    import fcntl

POLL_SECONDS = 0.02


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock of a file in the block, after at most `seconds`; yields whether nobody else
    holds it. Also True if the file cannot be made or locked: the lock saves repeated work only. The
    file is never deleted: a holder of a deleted file would exclude nobody.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _acquired(handle, seconds)
    finally:
        os.close(handle)  # releases the lock


def _acquired(handle: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_SECONDS)
        except (OSError, NameError):  # a file system, or a system, without locks
            return True
        else:
            return True

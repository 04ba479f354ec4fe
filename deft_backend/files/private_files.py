"""Files that no other user could write, with mode 0600, and locks on files."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deft_backend.files.folders import create_private

MOST_BYTES = 1 << 28  # largest file that is read: 256 MiB

POLL_SECONDS = 0.02  # between two looks at a lock


def read_private(path: Path) -> bytes:
    """The content of a file that only this user or root could write; else OSError says why not."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "it is a symbolic link; expected the file itself") from None
        raise
    with os.fdopen(handle, "rb") as file:
        reason = _unsafe(os.fstat(file.fileno()))
        if reason is not None:
            raise _refused(path, reason)
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise _refused(path, f"it holds more than {MOST_BYTES} bytes")
    return content


def read_private_json(path: Path) -> Any:
    return parsed(read_private(path))


def parsed(text: str | bytes) -> Any:
    """Parse JSON; every failure is a ValueError, also for JSON that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def write_private(path: Path, content: str | bytes) -> None:
    """Replace a file (or a link to one) at once, with mode 0600; missing folders get mode 0700."""
    create_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def open_private(path: Path) -> Any:
    """Open a file for writing from its beginning, with mode 0600.

    Raises OSError if it cannot be opened, or a symbolic link or no regular file is in its place.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _refused(path, "it is not a regular file")
        os.fchmod(handle, 0o600)
        os.truncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "wb")


def is_private(path: Path) -> bool:
    try:
        return _unsafe(os.lstat(path)) is None
    except OSError:
        return False


def unsafe_folder(folder: Path) -> str | None:
    """The reason why another user could exchange files below a folder, or None.

    Only this user and root may own the folder and the folders above it. No other user may write to
    them, unless they let each user change only the user's own files (as ``/tmp`` does).
    """
    real = folder.resolve()
    for path in dict.fromkeys((folder, *folder.parents, real, *real.parents)):
        status = path.lstat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to user {status.st_uid}"
        group = 0o020 if status.st_gid != os.getgid() else 0
        mode = 0 if stat.S_ISLNK(status.st_mode) else status.st_mode  # a link's mode means nothing
        if mode & (0o002 | group) and not mode & stat.S_ISVTX:
            return f"others may write to {path} (mode {stat.S_IMODE(mode):04o})"
    return None


def _unsafe(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {status.st_uid}; expected user {os.getuid()}, who runs this"
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        return f"others may write to it (mode {mode:04o}); run: chmod go-w on the file"
    return None


def _refused(path: Path, reason: str) -> OSError:
    return OSError(errno.EPERM, reason, str(path))


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
        except OSError:  # a file system without locks
            return True
        else:
            return True

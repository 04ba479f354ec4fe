"""Files of this user alone: written with mode 0600, and read only if nobody else could write them.

What a server reads from a cache decides what it computes. So a file in a cache counts only if it
belongs to this user or to root, is no symbolic link, and no other user may write to it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deft_backend.folders import create_private

MOST_BYTES = 1 << 28
"""Largest file that is read: 256 MiB."""


def read_private(path: Path) -> bytes:
    """The content of a file that only this user or root could write.

    Raises
    ------
    OSError
        If the file cannot be read. Its `strerror` says so, too, if the file is a symbolic link or
        no regular file, belongs to another user, is writable for others, or is too large.
    """
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
    """The content of a JSON file that only this user or root could write.

    Raises
    ------
    OSError
        See :func:`read_private`.
    ValueError
        If it holds no JSON.
    """
    return parsed(read_private(path))


def parsed(text: str | bytes) -> Any:
    """Parse JSON; every failure is a ValueError, also for JSON that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def write_private(path: Path, content: str | bytes) -> None:
    """Replace a file at once, with mode 0600; missing folders get mode 0700.

    A symbolic link in its place is replaced, not followed.

    Raises
    ------
    OSError
        If it cannot be written. No part of it stays behind.
    """
    data = content.encode() if isinstance(content, str) else content
    replace_private(path, lambda handle: _write_all(handle, data))


def replace_private(path: Path, write: Callable[[int], None]) -> None:
    """As :func:`write_private`; `write` gets the descriptor of the new file and closes it."""
    create_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        write(handle)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def open_private(path: Path) -> Any:
    """Open a file for writing from its beginning, with mode 0600; a symbolic link is refused."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "wb")


def is_private(path: Path) -> bool:
    """Whether :func:`read_private` would read a file."""
    try:
        return _unsafe(os.lstat(path)) is None
    except OSError:
        return False


def _write_all(handle: int, data: bytes) -> None:
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _unsafe(found: os.stat_result) -> str | None:
    """Why a file cannot be trusted, in words; or None."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {found.st_uid}; expected user {os.getuid()}, who runs this"
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        return f"others may write to it (mode {mode:04o}); run: chmod go-w on the file"
    return None


def _refused(path: Path, reason: str) -> OSError:
    return OSError(errno.EPERM, reason, str(path))

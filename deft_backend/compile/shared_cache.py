"""A Triton cache that the ranks of a server fill together: one rank compiles each kernel.

Ranks start at the same time and need the same kernels. Triton has no lock, and PyTorch's compiler
gives each GPU a cache of its own, so each rank would compile all of them. Here ranks compile into
one folder with a lock for each kernel. A rank skips the kernels that others compile, and takes them
from the cache afterwards.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from triton import knobs

from deft_backend.files.folders import create_private
from deft_backend.files.locks import locked

LOCKS = "locks"

PATIENCE = 60.0
"""Seconds to wait for a kernel that another process compiles. A process that has stopped keeps its
locks; this one then compiles by itself."""


class SharedCache:
    """A folder of compiled kernels with a lock for each kernel; it is made if it is missing.

    Raises OSError if the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        create_private(folder / LOCKS)
        (folder / LOCKS / "probe").touch(mode=0o600)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let Triton compile into the folder in the ``with`` block."""
        with knobs.cache.scope():
            knobs.cache.dir = str(self._folder)
            yield

    def lock(self, work: str, *, wait: bool) -> AbstractContextManager[bool]:
        """Hold the lock of some work, named in any words.

        Yields whether nobody else holds it. Without `wait`, another holder means False at once.
        """
        name = hashlib.sha256(work.encode()).hexdigest()[:32]
        return locked(self._folder / LOCKS / name, PATIENCE if wait else 0.0)

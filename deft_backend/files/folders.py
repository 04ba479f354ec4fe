"""The package's folders on this machine: their paths and their creation."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from deft_backend.settings.config import Settings, SettingsError

TRITON_CACHE = "TRITON_CACHE_DIR"

_USERS_TRITON_CACHE = os.environ.get(TRITON_CACHE)
"""As the process began. PyTorch's compiler sets the variable later, to a folder for each GPU."""


def cache_directory() -> Path:
    """The package's cache folder: ``DEFT_CACHE_DIR``, else `deft-backend` in the user's cache."""
    name = "DEFT_CACHE_DIR"
    return _cache_directory(Settings.from_env({name: os.environ.get(name, "")}))


def state_directory(settings: Settings) -> Path:
    return _cache_directory(settings) / "servers"


def tables_directory() -> Path:
    return cache_directory() / "tables"


def kernels_directory(settings: Settings) -> Path:
    """Where `deft warm` keeps compiled kernels: ``DEFT_KERNEL_CACHE``, else in the cache."""
    return settings.kernel_cache or _cache_directory(settings) / "kernels"


def compiled_directory(settings: Settings) -> Path:
    """Where all ranks of a server compile: ``TRITON_CACHE_DIR``, else `triton` in the cache."""
    return Path(_USERS_TRITON_CACHE or _cache_directory(settings) / "triton")


def driver_stub_directory() -> Path:
    return cache_directory() / "driver-stub" / "1"


def create_private(folder: Path) -> None:
    if folder.is_dir():
        return
    create_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _cache_directory(settings: Settings) -> Path:
    if settings.cache_dir is not None:
        return settings.cache_dir
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification, a relative path is invalid and must be ignored.
    if os.path.isabs(cache):
        return Path(cache) / "deft-backend"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home) / ".cache" / "deft-backend"
    # No HOME, and a user id without an entry in the system's list: a container's `--user`.
    folder = Path(tempfile.gettempdir()) / f"deft-backend-{os.getuid()}"
    with suppress(FileNotFoundError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise SettingsError(
                f"this user has no home folder, and {folder} is another user's; set DEFT_CACHE_DIR"
            )
    return folder


def write_fails(folder: Path) -> str | None:
    """Why files cannot be written into a folder, or None. A missing folder is made."""
    try:
        create_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)

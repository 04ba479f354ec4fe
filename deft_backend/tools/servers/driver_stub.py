"""A stand-in for ``libcuda.so.1``, so that hosts built for CUDA start without a driver.

``sgl_kernel`` links the driver library even if the server runs on the CPU. It needs one symbol to
load. The stand-in's function returns an error code, so no program mistakes it for a GPU.
"""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from deft_backend.files.folders import create_private, driver_stub_directory
from deft_backend.files.private_files import is_private, unsafe_folder
from deft_backend.settings.config import SettingsError

SONAME = "libcuda.so.1"

_CUDA_ERROR_NOT_INITIALIZED = 3

_SPECIAL = ":;$"  # in a list of library folders: separators, and the start of a variable

_SOURCE = f"""
/* Answers every query with CUDA_ERROR_NOT_INITIALIZED. */
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {{
    (void)data; (void)attribute; (void)pointer;
    return {_CUDA_ERROR_NOT_INITIALIZED};
}}
"""


class DriverStubError(RuntimeError):
    """The stand-in for the NVIDIA driver library cannot be compiled or written."""


class StubFolderError(DriverStubError):
    """The stand-in's folder cannot be written, or other users may write to it."""


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The real driver library, or None; the stand-in has no ``cuInit``."""
    try:
        library = ctypes.CDLL(SONAME)
        _ = library.cuInit
    except (OSError, AttributeError):
        return None
    return library


def has_nvidia_driver() -> bool:
    """Whether the real ``libcuda.so.1`` can be loaded; our stand-in does not count."""
    return _driver() is not None


@functools.cache
def num_gpus() -> int:
    library = _driver()
    count = ctypes.c_int(0)
    if library is None or library.cuInit(0) != 0:
        return 0
    return count.value if library.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def find_compiler() -> list[str] | None:
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    installed = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return [installed] if installed else None


def ensure_driver_stub() -> Path:
    """The folder of the compiled stand-in, first on ``LD_LIBRARY_PATH``; raises DriverStubError."""
    try:
        folder = driver_stub_directory()
    except SettingsError as error:
        raise StubFolderError(str(error)) from error
    library = folder / SONAME
    try:
        create_private(folder)
        reason = unsafe_folder(folder)
        if reason is not None:
            raise StubFolderError(
                f"{reason}, so another user could exchange {library}; set DEFT_CACHE_DIR to a "
                "folder that is yours alone"
            )
        if set(str(folder)) & set(_SPECIAL):
            raise StubFolderError(
                f"the path {folder} has one of the characters {' '.join(_SPECIAL)}, which mean "
                "something in LD_LIBRARY_PATH; set DEFT_CACHE_DIR to a folder without them"
            )
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise StubFolderError(
                f"{folder} is on a file system that is mounted with noexec, from which no library "
                "can be loaded; set DEFT_CACHE_DIR to a folder on another one"
            )
        if not is_private(library):
            with tempfile.TemporaryDirectory(dir=folder) as work:
                built = _compile(_needed_compiler(), Path(work))
                built.chmod(0o700)
                os.replace(built, library)  # atomic: another process sees all of it or nothing
    except OSError as error:
        raise StubFolderError(
            f"cannot write {library}: {error}; set DEFT_CACHE_DIR to a folder that you may write"
        ) from error
    return folder


def loading_fails(folder: Path) -> str | None:
    load = f"import ctypes; ctypes.CDLL({str(folder / SONAME)!r}).cuPointerGetAttribute"
    done = subprocess.run(
        [sys.executable, "-S", "-c", load],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return said if done.returncode else None


def _needed_compiler() -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        named = os.environ.get("CC")
        reason = f"CC is {named!r}, which is not installed" if named else "found none"
        raise DriverStubError(
            f"a C compiler is needed once, to make a stand-in for {SONAME} on a machine without "
            f"an NVIDIA driver ({reason}). Install one (Debian/Ubuntu: 'apt-get install gcc'; "
            "Fedora: 'dnf install gcc'), or set CC to its path"
        )
    return compiler


def _compile(compiler: list[str], work: Path) -> Path:
    source, built = work / "driver_stub.c", work / SONAME
    source.write_text(_SOURCE)
    command = [*compiler, "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", str(built)]
    result = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, errors="replace", check=False
    )
    if result.returncode != 0:
        raise DriverStubError(
            f"{shlex.join(command)} failed with exit code {result.returncode}:\n"
            f"{result.stderr.strip()}\nInstall a working C compiler or set CC to one"
        )
    return built

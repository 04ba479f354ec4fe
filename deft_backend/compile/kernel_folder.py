"""A folder of compiled kernels, made by `deft warm` on one machine and used on another.

A server copies what it holds into Triton's cache, where launches look. That cache itself cannot be
moved, because it holds absolute paths. Layout::

    manifest.json      what the kernels were made from, and the SHA-256 of every file
    <key>/<file>       the files of one kernel, by its key in Triton's cache
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager

from deft_backend.files.folders import create_private
from deft_backend.files.json_fields import FieldError, mapping, shown, text, within
from deft_backend.files.private_files import locked, read_private, read_private_json, write_private
from deft_backend.settings.version import VERSION, installed_version

MANIFEST = "manifest.json"
_KEPT = (".json", ".cubin")
"""What Triton needs to launch a kernel; it keeps the steps of compilation for readers."""
_KEY = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"\w[\w.-]*")

Files = dict[str, dict[str, str]]
"""SHA-256 of each file of each kernel, by the kernel's key in Triton's cache."""


class KernelFolderError(ValueError):
    """A folder whose kernels cannot be used, and why."""


@dataclass(frozen=True)
class Origin:
    """What compiled kernels depend on."""

    package: str  # version, as of torch and triton
    sources: str  # digest of the package's kernels and of what is compiled into them
    torch: str
    triton: str
    gpu: str  # compute capability, such as ``sm_90``

    @classmethod
    def of(cls, gpu: str) -> Origin:
        return cls(
            package=VERSION,
            sources=digest_of(["kernels", "shapes.py", "planner", "policies"])[:16],
            torch=installed_version("torch") or "unknown",
            triton=triton.__version__,
            gpu=gpu,
        )

    def differences(self, here: Origin) -> str:
        """The differences from `here`, in words; empty if there are none."""
        differing = []
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(here, field.name)
            if theirs != ours and field.name == "sources":
                differing.append("other kernel sources")
            elif theirs != ours:
                name = {"package": "deft-backend", "gpu": "GPU"}.get(field.name, field.name)
                differing.append(f"{name} {theirs}, this is {ours}")
        return "; ".join(differing)


@dataclass(frozen=True)
class Taken:
    """What :func:`take` did: kernels copied, kernels that Triton's cache held, damaged ones."""

    copied: int
    held: int
    damaged: int


def fill(folder: Path, origin: Origin, kernels: Iterable[Any]) -> int:
    """Add compiled kernels to a folder, and drop those of another origin; how many it holds then.

    Raises KernelFolderError for a folder that is not `deft warm`'s, OSError if it is unwritable.
    """
    create_private(folder)
    before, entries = check_fillable(folder) or (origin, {})
    if before != origin:
        for key in entries:
            shutil.rmtree(folder / key, ignore_errors=True)
        entries = {}
    for kernel in kernels:
        files = {}
        for name, path in kernel.metadata_group.items():
            if name.endswith(_KEPT):
                content = Path(path).read_bytes()
                write_private(folder / kernel.hash / name, content)
                files[name] = hashlib.sha256(content).hexdigest()
        entries[kernel.hash] = files
    manifest = {**asdict(origin), "kernels": dict(sorted(entries.items()))}
    write_private(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return len(entries)


def take(folder: Path, here: Origin) -> Taken:
    """Copy a folder's kernels into Triton's cache.

    Raises KernelFolderError for a folder that is not `deft warm`'s, or of another origin than
    `here`, OSError if Triton's cache cannot be written.
    """
    origin, entries = _read(folder)
    different = origin.differences(here)
    if different:
        raise KernelFolderError(f"its kernels are for {different}")
    copied = held = damaged = 0
    for key, files in entries.items():
        cache = get_cache_manager(key)
        (group,) = (name for name in files if name.endswith(".json"))
        if cache.get_group(group) is not None:
            held += 1
            continue
        contents = {name: _content(folder / key / name, digest) for name, digest in files.items()}
        if None in contents.values():
            damaged += 1
            continue
        cache.put_group(group, {name: cache.put(data, name) for name, data in contents.items()})
        copied += 1
    return Taken(copied, held, damaged)


def check_fillable(folder: Path) -> tuple[Origin, Files] | None:
    """Origin and files of a folder's kernels; None for an empty folder.

    Raises KernelFolderError if it holds anything else.
    """
    return _read(folder) if folder.is_dir() and any(folder.iterdir()) else None


def is_filled(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _content(path: Path, digest: str) -> bytes | None:
    """A file's bytes; None if the file has changed or cannot be read."""
    try:
        content = read_private(path)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == digest else None


def _read(folder: Path) -> tuple[Origin, Files]:
    try:
        content = read_private_json(folder / MANIFEST)
        kernels = mapping(content, "kernels")
        named = {field.name: text(content, field.name, 100) for field in fields(Origin)}
        return Origin(**named), {key: _files_of(kernels, key) for key in kernels}
    except FileNotFoundError:
        raise KernelFolderError(f"it has no {MANIFEST}: `deft warm` did not fill it") from None
    except OSError as error:
        raise KernelFolderError(f"its {MANIFEST} cannot be used: {error.strerror}") from None
    except ValueError as error:
        raise KernelFolderError(f"its {MANIFEST} is damaged: {error}") from None


def _files_of(kernels: Mapping[str, Any], key: str) -> dict[str, str]:
    if not _KEY.fullmatch(key):
        raise FieldError(f"kernels holds {shown(key)}; expected keys of 64 hexadecimal digits")
    named = mapping(kernels, key)
    with within(key):
        files = {name: text(named, name) for name in named}
        for name, digest in files.items():
            if not _FILE.fullmatch(name) or not _KEY.fullmatch(digest):
                raise FieldError(f"the file {shown(name)} has no plain name or no SHA-256")
    if sum(name.endswith(".json") for name in files) != 1:
        raise FieldError(f"{key} holds {shown(list(files))}; expected one file of JSON")
    return files


PACKAGE = Path(__file__).parent.parent


def digest_of(places: Iterable[str]) -> str:
    """Digest of Python sources: paths in the package, files or whole folders, and their texts."""
    digest = hashlib.sha256()
    for place in places:
        root = PACKAGE / place
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            name = path.relative_to(PACKAGE).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


LOCKS = "locks"

PATIENCE = 60.0
"""Seconds to wait for a kernel that another process compiles. A process that has stopped keeps its
locks; this one then compiles by itself."""


class SharedCache:
    """A Triton cache that the ranks of a server fill together: one rank compiles each kernel.

    Ranks start at the same time and need the same kernels. Triton has no lock, and PyTorch's
    compiler gives each GPU a cache of its own, so each rank would compile all of them. Here ranks
    compile into one folder, which is made if it is missing, with a lock for each kernel. A rank
    skips the kernels that others compile, and takes them from the cache afterwards.

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

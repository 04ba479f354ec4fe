"""Read a host's modules as syntax trees, from a folder or from inside a wheel."""

from __future__ import annotations

import ast
import warnings
import zipfile
from pathlib import Path

_COMPILED = (".so", ".pyd")


class HostFiles:
    """The source of a host's packages.

    - `path`: a folder that holds top-level packages, or a wheel (a zip file).

    Raises ValueError if the path is neither.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._zip: zipfile.ZipFile | None = None
        self._entries: frozenset[str] = frozenset()
        if self.path.is_dir():
            return
        try:
            self._zip = zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{self.path} is neither a folder nor a wheel ({error}); expected the folder that "
                "holds the host's package, or a .whl file"
            ) from None
        entries = set(self._zip.namelist())
        folders = {name[: at + 1] for name in entries for at, c in enumerate(name) if c == "/"}
        self._entries = frozenset(entries | folders)

    def parse(self, module: str) -> tuple[ast.Module, bool] | None:
        """The module's syntax tree and whether it is a package; None if it has no source.

        A folder without ``__init__.py`` is a package with an empty tree. :meth:`unreadable` says
        why a module has no source.
        """
        path = module.replace(".", "/")
        for file, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            content = self._read(file)
            if content is None:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings about the host's own string escapes
                    return ast.parse(content, filename=file), is_package
            except (SyntaxError, ValueError):
                return None
        if self._is_folder(path):
            return ast.Module(body=[], type_ignores=[]), True
        return None

    def unreadable(self, module: str) -> str | None:
        """Why a module exists but has no source to read, or None."""
        path = module.replace(".", "/")
        for file in (f"{path}/__init__.py", f"{path}.py"):
            if self._read(file) is not None:
                return f"{file} has syntax that this Python does not know"
        folder, _, name = path.rpartition("/")
        for file in self._in_folder(folder):
            if file.endswith(_COMPILED) and file.split(".")[0] == name:
                return f"{module} is compiled"
        return None

    def _read(self, file: str) -> bytes | None:
        if self._zip is not None:
            return self._zip.read(file) if file in self._entries else None
        try:
            return (self.path / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _is_folder(self, path: str) -> bool:
        if self._zip is not None:
            return f"{path}/" in self._entries
        return (self.path / path).is_dir()

    def _in_folder(self, folder: str) -> list[str]:
        if self._zip is None:
            place = self.path / folder
            return [entry.name for entry in place.iterdir()] if place.is_dir() else []
        start = f"{folder}/" if folder else ""
        rest = [name[len(start) :] for name in self._entries if name.startswith(start)]
        return [name for name in rest if "/" not in name]

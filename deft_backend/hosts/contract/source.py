"""Read a host's source: its modules as syntax trees, and what their statements bind."""

import ast
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class HostFiles:
    """The source of a host's packages, below the folder that holds them."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; expected the one with the host's package")
        self.folder = folder

    def parse(self, module: str) -> tuple[ast.Module, bool] | str | None:
        """The module's syntax tree and whether it is a package.

        A folder without ``__init__.py`` is a package with an empty tree. A text says why the module
        cannot be read; None: there is no such module.
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
                return f"{file} has syntax that this Python does not know"
        place = self.folder / path
        if place.is_dir():
            return ast.Module(body=[], type_ignores=[]), True
        compiled = any(
            file.suffix in (".so", ".pyd") for file in place.parent.glob(f"{place.name}.*")
        )
        return f"{module} is compiled" if compiled else None

    def _read(self, file: str) -> bytes | None:
        try:
            return (self.folder / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None


class Signature(NamedTuple):
    """Parameters of a function or constructor, without the instance; `takes_any` for ``**``."""

    names: tuple[str, ...]
    takes_any: bool


def bound_names(body: Iterable[ast.stmt]) -> tuple[dict[str, list[ast.AST]], list[ast.ImportFrom]]:
    """The values of each name that statements bind, and the imports of ``*``."""
    names: dict[str, list[ast.AST]] = {}
    stars: list[ast.ImportFrom] = []

    def bind(target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            names.setdefault(target.id, []).append(value)
        for element in getattr(target, "elts", ()):
            bind(element, target)

    for node in statements(body):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            names.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            bind(node.target, node.value or node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if isinstance(node, ast.ImportFrom) and alias.name == "*":
                    stars.append(node)
                else:
                    names.setdefault(alias.asname or alias.name.split(".")[0], []).append(node)
    return names, stars


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the body runs, including those in ``if`` and ``try``.

    The function leaves out statements for type checkers.
    """
    for node in body:
        yield node
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            continue
        if not (isinstance(node, ast.If) and _for_type_checkers(node.test)):
            yield from statements(getattr(node, "body", ()))
        for part in ("orelse", "finalbody"):
            yield from statements(getattr(node, part, ()))
        for part in ("handlers", "cases"):
            for block in getattr(node, part, ()):
                yield from statements(block.body)


def _for_type_checkers(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def class_members(node: ast.ClassDef) -> dict[str, list[ast.AST]]:
    """The values of a class's own names, and of the attributes that its methods set."""
    members, _ = bound_names(node.body)
    for method in statements(node.body):
        if not isinstance(method, FUNCTIONS) or _is_static(method):
            continue
        instance = next(iter(_arguments(method)), None)
        for each in ast.walk(method):
            if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Store):
                continue
            if isinstance(each.value, ast.Name) and each.value.id == instance:
                members.setdefault(each.attr, [each])
    return members


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> Signature:
    positional = _arguments(node)[int(is_method and not _is_static(node)) :]
    names = [*positional, *(argument.arg for argument in node.args.kwonlyargs)]
    return Signature(tuple(names), takes_any=node.args.kwarg is not None)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(getattr(decorator, "id", "") == "staticmethod" for decorator in node.decorator_list)

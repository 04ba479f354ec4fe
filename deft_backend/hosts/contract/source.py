"""Read a host's source: its modules as syntax trees, and what their statements bind."""

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPILED = (".so", ".pyd")


class HostFiles:
    """The source of a host's packages, below the folder that holds them."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; expected the one with the host's package")
        self.folder = folder

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
        if (self.folder / path).is_dir():
            return ast.Module(body=[], type_ignores=[]), True
        return None

    def unreadable(self, module: str) -> str | None:
        """Why a module exists but has no source to read, or None."""
        path = module.replace(".", "/")
        for file in (f"{path}/__init__.py", f"{path}.py"):
            if self._read(file) is not None:
                return f"{file} has syntax that this Python does not know"
        folder, _, name = path.rpartition("/")
        compiled = (self.folder / folder).glob(f"{name}.*")
        if any(file.suffix in _COMPILED for file in compiled):
            return f"{module} is compiled"
        return None

    def _read(self, file: str) -> bytes | None:
        try:
            return (self.folder / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None


Statements = Iterable[ast.stmt]


@dataclass(frozen=True)
class Signature:
    """Parameters of a function or constructor, without the instance; `takes_any` for ``**``."""

    names: tuple[str, ...]
    takes_any: bool


def bound_names(body: Statements) -> tuple[dict[str, list[ast.AST]], list[ast.ImportFrom]]:
    """The values of each name that statements bind, and the imports of ``*``."""
    names: dict[str, list[ast.AST]] = {}
    stars: list[ast.ImportFrom] = []

    def bind(target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            names.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                bind(element, target)
        elif isinstance(target, ast.Starred):
            bind(target.value, value)

    for node in statements(body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            bind(node.target, node.value or node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            bind(node.target, node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names.setdefault(alias.asname or alias.name.split(".")[0], []).append(node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    stars.append(node)
                else:
                    names.setdefault(alias.asname or alias.name, []).append(node)
    return names, stars


def statements(body: Statements) -> Iterator[ast.stmt]:
    """Statements that run when the body runs, including those in ``if`` and ``try``.

    The function leaves out statements for type checkers.
    """
    for node in body:
        yield node
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
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


def instance_attributes(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, ast.AST]]:
    """Attributes that a method sets on its first argument, and the assigned expressions."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if not arguments or _is_static(function):
        return
    instance = arguments[0].arg
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == instance:
                yield node.attr, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            first, second = [*node.args, None, None][:2]
            if (
                node.func.id == "setattr"
                and isinstance(first, ast.Name)
                and first.id == instance
                and isinstance(second, ast.Constant)
            ):
                yield str(second.value), node


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> Signature:
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if is_method and not _is_static(node):
        positional = positional[1:]
    names = [*positional, *(argument.arg for argument in node.args.kwonlyargs)]
    return Signature(tuple(names), takes_any=node.args.kwarg is not None)


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(getattr(decorator, "id", "") == "staticmethod" for decorator in node.decorator_list)


def fields_in_call(node: ast.expr) -> list[str]:
    """Field names in ``namedtuple("Name", ["a", "b"])``."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return []
    fields = node.args[1]
    if isinstance(fields, ast.Constant) and isinstance(fields.value, str):
        return fields.value.replace(",", " ").split()
    return [
        constant.value
        for element in getattr(fields, "elts", ())
        for constant in [element.elts[0] if isinstance(element, ast.Tuple) else element]
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    ]

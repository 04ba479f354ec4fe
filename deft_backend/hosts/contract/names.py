"""Find what a dotted name of a host refers to, in the host's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deft_backend.hosts.contract.source import (
    HostFiles,
    Signature,
    bound_names,
    fields_in_call,
    instance_attributes,
    signature_of,
    statements,
)

Kind = Literal["module", "class", "function", "value", "lazy", "unreadable"]


@dataclass(frozen=True, eq=False)
class Definition:
    """One place that defines a name; a name may have several, by version or device."""

    # ``lazy`` is a name that a module's ``__getattr__`` answers: it exists, and the source shows no
    # more.
    kind: Kind
    module: str  # the module that defines it, or the module itself
    node: ast.AST | None = None  # a class, a function, or the expression assigned to a value
    reason: str = ""  # why the definition or its members are unreadable; else empty
    owner: Definition | None = None  # for a member of a class: the class that defines it


@dataclass(frozen=True)
class _Scope:
    """A module that was read: its names and the statements that bind each of them."""

    module: str
    is_package: bool
    names: dict[str, list[ast.AST]]
    stars: list[ast.ImportFrom]


class HostNames:
    """Definitions of the names in a host's source; each file is read once.

    - `packages`: Top-level packages to look into. Names imported from others are values.
    """

    def __init__(self, files: HostFiles, packages: set[str]) -> None:
        self._files = files
        self._packages = packages
        self._scopes: dict[str, _Scope | str | None] = {}
        self._members: dict[ast.ClassDef, dict[str, list[ast.AST]]] = {}

    def module(self, name: str) -> list[Definition]:
        """The module of a dotted name; empty if the host has none."""
        scope = self._scope(name)
        if scope is None:
            return []
        if isinstance(scope, str):
            return [Definition("unreadable", name, reason=scope)]
        return [Definition("module", name)]

    def attribute(self, owners: list[Definition], name: str) -> list[Definition]:
        """What `name` refers to in any of `owners`; empty if no owner has it."""
        definitions: list[Definition] = []
        for owner in owners:
            if owner.kind == "unreadable":
                definitions.append(owner)
            elif owner.kind == "module":
                definitions += self._in_module(owner.module, name, set())
            elif owner.kind == "class":
                definitions += self._in_class(owner, name)
            elif owner.kind == "lazy":
                definitions.append(Definition("unreadable", owner.module, reason=owner.reason))
            elif isinstance(owner.node, ast.expr) and name in fields_in_call(owner.node):
                definitions.append(Definition("value", owner.module, owner.node))
        readable = [definition for definition in definitions if definition.kind != "unreadable"]
        return readable or definitions

    def known(self, owners: list[Definition]) -> set[str]:
        """Every name in any of `owners`, for messages."""
        names: set[str] = set()
        for owner in owners:
            scope = self._scope(owner.module) if owner.kind == "module" else None
            if isinstance(scope, _Scope):
                names |= set(scope.names)
            elif owner.kind == "class":
                for base in self._bases_first_to_last(owner):
                    if isinstance(base.node, ast.ClassDef):
                        names |= set(self._class_members(base.node))
            elif isinstance(owner.node, ast.expr):
                names |= set(fields_in_call(owner.node))
        return names

    def signature(self, definition: Definition) -> Signature | None:
        """Parameters of a function or of a class's constructor; None if the source hides them."""
        node = definition.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return signature_of(node, is_method=definition.owner is not None)
        if definition.kind == "class":
            return self._constructor(definition)
        return None

    # Modules.

    def _scope(self, module: str) -> _Scope | str | None:
        """The module, or the reason why it cannot be read, or None if it does not exist."""
        if module not in self._scopes:
            parsed = self._files.parse(module)
            if parsed is None:
                self._scopes[module] = self._files.unreadable(module)
            else:
                tree, is_package = parsed
                names, stars = bound_names(tree.body)
                self._scopes[module] = _Scope(module, is_package, names, stars)
        return self._scopes[module]

    def _in_module(self, module: str, name: str, seen: set[tuple[str, str]]) -> list[Definition]:
        if (module, name) in seen:
            return []
        seen.add((module, name))
        scope = self._scope(module)
        if scope is None:
            return []
        if isinstance(scope, str):
            return [Definition("unreadable", module, reason=scope)]
        definitions = [
            definition
            for node in scope.names.get(name, ())
            for definition in self._follow(node, name, scope, seen)
        ]
        for star in () if definitions else scope.stars:
            definitions += self._in_module(_absolute(star, scope), name, seen)
        if not definitions and scope.is_package:
            definitions = self.module(f"{module}.{name}")
        if not definitions and name in _lazy_names(scope):
            reason = f"{module} answers {name!r} in __getattr__"
            definitions = [Definition("lazy", module, reason=reason)]
        return definitions

    def _follow(
        self, node: ast.AST, name: str, scope: _Scope, seen: set[tuple[str, str]]
    ) -> list[Definition]:
        """What a binding refers to; imports and plain aliases lead to their target."""
        if isinstance(node, ast.ClassDef):
            return [Definition("class", scope.module, node)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [Definition("function", scope.module, node)]
        if isinstance(node, ast.ImportFrom):
            source = _absolute(node, scope)
            if source.split(".")[0] not in self._packages:
                return [Definition("value", scope.module, node)]
            original = next(a.name for a in node.names if name in (a.asname, a.name))
            return self._in_module(source, original, seen) or self.module(f"{source}.{original}")
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if name in (a.asname, a.name.split(".")[0]))
            target = alias.name if alias.asname else alias.name.split(".")[0]
            if target.split(".")[0] not in self._packages:
                return [Definition("value", scope.module, node)]
            return self.module(target)
        if isinstance(node, (ast.Name, ast.Attribute)):
            definitions = self._expression(node, scope, seen)
            if definitions:
                return definitions
        return [Definition("value", scope.module, node)]

    def _expression(
        self, node: ast.expr, scope: _Scope, seen: set[tuple[str, str]] | None = None
    ) -> list[Definition]:
        """What an expression of names and dots refers to; empty for every other expression."""
        if isinstance(node, ast.Subscript):
            return self._expression(node.value, scope, seen)
        if isinstance(node, ast.Name):
            return self._in_module(scope.module, node.id, set() if seen is None else seen)
        if isinstance(node, ast.Attribute):
            return self.attribute(self._expression(node.value, scope, seen), node.attr)
        return []

    # Classes.

    def _bases_first_to_last(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases, depth first, without bases outside the host."""
        waiting, seen = [definition], set()
        while waiting:
            current = waiting.pop(0)
            if current.node is None and current.kind == "unreadable":
                yield current
            if not isinstance(current.node, ast.ClassDef) or current.node in seen:
                continue
            seen.add(current.node)
            yield current
            scope = self._scope(current.module)
            if isinstance(scope, _Scope):
                bases = [d for base in current.node.bases for d in self._expression(base, scope)]
                waiting = bases + waiting

    def _in_class(self, definition: Definition, name: str) -> list[Definition]:
        unreadable = []
        for base in self._bases_first_to_last(definition):
            if base.kind == "unreadable":
                unreadable.append(base)
                continue
            assert isinstance(base.node, ast.ClassDef)
            scope = self._scope(base.module)
            nodes = self._class_members(base.node).get(name, [])
            if nodes and isinstance(scope, _Scope):
                return [d for node in nodes for d in self._member(node, name, base, scope)]
        return unreadable

    def _member(
        self, node: ast.AST, name: str, owner: Definition, scope: _Scope
    ) -> list[Definition]:
        if isinstance(node, ast.ClassDef):
            return [Definition("class", owner.module, node, owner=owner)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [Definition("function", owner.module, node, owner=owner)]
        if isinstance(node, ast.Name) and node.id != name and isinstance(owner.node, ast.ClassDef):
            # `forward = forward_cuda`, of the class itself or of the module.
            if node.id in self._class_members(owner.node):
                return self._in_class(owner, node.id)
            return self._expression(node, scope) or [Definition("value", owner.module, node)]
        return [Definition("value", owner.module, node, owner=owner)]

    def _class_members(self, node: ast.ClassDef) -> dict[str, list[ast.AST]]:
        if node not in self._members:
            names, _ = bound_names(node.body)
            for method in statements(node.body):
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    for name, value in instance_attributes(method):
                        names.setdefault(name, [value])
            self._members[node] = names
        return self._members[node]

    def _constructor(self, definition: Definition) -> Signature | None:
        """Parameters of the first ``__init__`` or ``__new__``; else the class's fields."""
        fields: list[str] = []
        for base in self._bases_first_to_last(definition):
            if not isinstance(base.node, ast.ClassDef):
                return None
            members = self._class_members(base.node)
            for name in ("__init__", "__new__"):
                for node in members.get(name, ()):
                    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        return signature_of(node, is_method=True)
            fields += [
                statement.target.id
                for statement in base.node.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            ]
        if not fields and isinstance(definition.node, ast.ClassDef):
            fields = [name for base in definition.node.bases for name in fields_in_call(base)]
        return Signature(tuple(fields), takes_any=False)


def _absolute(node: ast.ImportFrom, scope: _Scope) -> str:
    """The module that an import names, relative ones resolved."""
    if node.level == 0:
        return node.module or ""
    parts = scope.module.split(".")
    parts = parts[: len(parts) - node.level + (1 if scope.is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _lazy_names(scope: _Scope) -> set[str]:
    """Strings in a module with a ``__getattr__``: the names that it may answer."""
    if "__getattr__" not in scope.names:
        return set()
    return {
        constant.value
        for nodes in scope.names.values()
        for node in nodes
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }

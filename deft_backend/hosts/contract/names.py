"""Find what a dotted name of a host refers to, in the host's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deft_backend.hosts.contract.source import (
    FUNCTIONS,
    HostFiles,
    Signature,
    bound_names,
    class_members,
    signature_of,
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

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that an import names, relative ones resolved."""
        if node.level == 0:
            return node.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


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
            if owner.kind == "module":
                definitions += self._in_module(owner.module, name, set())
            elif owner.kind == "class":
                definitions += self._in_class(owner, name)
            elif owner.kind in ("unreadable", "lazy"):
                definitions.append(Definition("unreadable", owner.module, reason=owner.reason))
        readable = [definition for definition in definitions if definition.kind != "unreadable"]
        return readable or definitions

    def known(self, owners: list[Definition]) -> set[str]:
        """Every name in any of `owners`, for messages."""
        names: set[str] = set()
        for owner in owners:
            scope = self._scope(owner.module)
            if owner.kind == "module" and isinstance(scope, _Scope):
                names.update(scope.names)
            for base in self._bases_first_to_last(owner):
                names.update(self._class_members(base))
        return names

    def signature(self, definition: Definition) -> Signature | None:
        """Parameters of a function or of a class's constructor; None if the source hides them.

        Those of a class are its first ``__init__`` or ``__new__``'s; else its fields.
        """
        if isinstance(definition.node, FUNCTIONS):
            return signature_of(definition.node, is_method=definition.owner is not None)
        if definition.kind != "class":
            return None
        fields: list[str] = []
        for base in self._bases_first_to_last(definition):
            if not isinstance(base.node, ast.ClassDef):
                return None
            members = self._class_members(base)
            for node in (*members.get("__init__", ()), *members.get("__new__", ())):
                if isinstance(node, FUNCTIONS):
                    return signature_of(node, is_method=True)
            fields += [
                statement.target.id
                for statement in base.node.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            ]
        return Signature(tuple(fields), takes_any=False)

    def _scope(self, module: str) -> _Scope | str | None:
        """The module, or the reason why it cannot be read, or None if it does not exist."""
        if module not in self._scopes:
            parsed = self._files.parse(module)
            if isinstance(parsed, tuple):
                tree, is_package = parsed
                self._scopes[module] = _Scope(module, is_package, *bound_names(tree.body))
            else:
                self._scopes[module] = parsed
        return self._scopes[module]

    def _in_module(self, module: str, name: str, seen: set[tuple[str, str]]) -> list[Definition]:
        """`seen` holds the names that led here: imports may go in a circle."""
        scope = self._scope(module)
        if (module, name) in seen or not isinstance(scope, _Scope):
            return self.module(module) if isinstance(scope, str) else []
        seen.add((module, name))
        definitions = [
            definition
            for node in scope.names.get(name, ())
            for definition in self._follow(node, name, scope, seen)
        ]
        for star in () if definitions else scope.stars:
            definitions += self._in_module(scope.absolute(star), name, seen)
        if not definitions and scope.is_package:
            definitions = self.module(f"{module}.{name}")
        if not definitions and name in _lazy_names(scope):
            reason = f"{module} answers {name!r} in __getattr__"
            definitions = [Definition("lazy", module, reason=reason)]
        return definitions

    def _in_class(self, definition: Definition, name: str) -> list[Definition]:
        unreadable = []
        for base in self._bases_first_to_last(definition):
            if base.kind == "unreadable":
                unreadable.append(base)
            nodes = self._class_members(base).get(name, [])
            scope = self._scope(base.module)
            if nodes and isinstance(scope, _Scope):
                return [d for node in nodes for d in self._follow(node, name, scope, set(), base)]
        return unreadable

    def _follow(
        self, node: ast.AST, name: str, scope: _Scope, seen: set[tuple[str, str]],
        owner: Definition | None = None,
    ) -> list[Definition]:  # fmt: skip
        """What a binding refers to; imports and plain aliases lead to their target.

        `owner` is the class whose member it is.
        """
        value = Definition("value", scope.module, node, owner=owner)
        if isinstance(node, ast.ClassDef):
            return [Definition("class", scope.module, node, owner=owner)]
        if isinstance(node, FUNCTIONS):
            return [Definition("function", scope.module, node, owner=owner)]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            alias = next(a for a in node.names if name in (a.asname, a.name.split(".")[0]))
            target = alias.name if alias.asname else name
            if isinstance(node, ast.ImportFrom):
                target = scope.absolute(node)
            if target.split(".")[0] not in self._packages:
                return [value]
            if isinstance(node, ast.Import):
                return self.module(target)
            original = alias.name
            return self._in_module(target, original, seen) or self.module(f"{target}.{original}")
        if isinstance(node, ast.Name) and owner is not None and node.id != name:
            # `forward = forward_cuda`, of the class itself or of the module.
            found = self._in_class(owner, node.id)
            return found or self._expression(node, scope, seen) or [value]
        if isinstance(node, (ast.Name, ast.Attribute)) and owner is None:
            return self._expression(node, scope, seen) or [value]
        return [value]

    def _expression(
        self, node: ast.expr, scope: _Scope, seen: set[tuple[str, str]]
    ) -> list[Definition]:
        """What an expression of names and dots refers to; empty for every other expression."""
        if isinstance(node, ast.Subscript):
            return self._expression(node.value, scope, seen)
        if isinstance(node, ast.Name):
            return self._in_module(scope.module, node.id, seen)
        if isinstance(node, ast.Attribute):
            return self.attribute(self._expression(node.value, scope, seen), node.attr)
        return []

    def _bases_first_to_last(self, definition: Definition) -> Iterator[Definition]:
        """A class and its bases, depth first, without bases outside the host."""
        waiting, seen = [definition], set()
        while waiting:
            current = waiting.pop(0)
            if current.kind == "unreadable":
                yield current
            if not isinstance(current.node, ast.ClassDef) or current.node in seen:
                continue
            seen.add(current.node)
            yield current
            scope = self._scope(current.module)
            if isinstance(scope, _Scope):
                bases = [
                    d for base in current.node.bases for d in self._expression(base, scope, set())
                ]
                waiting = bases + waiting

    def _class_members(self, definition: Definition) -> dict[str, list[ast.AST]]:
        node = definition.node
        if not isinstance(node, ast.ClassDef):
            return {}
        if node not in self._members:
            self._members[node] = class_members(node)
        return self._members[node]


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

"""`Kernel`: a Triton kernel, compiled for the GPU or interpreted on the CPU, launched quickly."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, get_type_hints

import torch
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from deft_backend.compile import variants


def named(structure: Any, value: Any) -> Any:
    """A plain tuple as the NamedTuple `structure`, and so for the tuples in it; else the value."""
    if not (isinstance(structure, type) and issubclass(structure, tuple)):
        return value
    hints = get_type_hints(structure)
    return structure(*(named(hints[name], field) for name, field in zip(hints, value, strict=True)))


check_overflow = False
"""Whether the interpreter checks integers for overflow. The check slows down every operation, so
only tests switch it on."""


Runner = Callable[..., None]
"""Launches a compiled kernel for its grid: ``runner(*arguments, *constants, stream=stream)``.

An argument may be an address instead of a tensor. Triton asks a tensor for its address and the
driver what it points to, which takes most of a launch's time."""


def addresses_of(arguments: Any) -> Any:
    """Arguments of a launch with the address of each tensor in its place."""
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr()
    if isinstance(arguments, tuple):
        return tuple(addresses_of(each) for each in arguments)
    return arguments


def _grid(programs: int | tuple[int, ...]) -> tuple[int, ...]:
    sizes = (programs,) if isinstance(programs, int) else programs
    return (*sizes, 1, 1)[:3]


class Kernel:
    """A kernel, compiled for the GPU or interpreted on the CPU.

    To find the compiled variant, Triton analyses every argument of every launch, which takes longer
    than a short kernel runs. Layers of a model do not differ in what Triton checks, so a launch
    with a known `variant` and aligned pointers goes to the compiled kernel directly.

    A parameter annotated with a NamedTuple is a structure: the kernel reads its fields by name.
    Launches pass the fields as a plain tuple, which is faster; Triton needs names only to compile.
    A structure holds only integers that belong to the `variant`, because Triton compiles for them
    whatever `do_not_specialize` says.

    While :func:`~deft_backend.compile.variants.recorded` records, launches run nothing.
    """

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module = module
        self._name = name
        self._compiled = getattr(module, name)
        function = getattr(self._compiled, "fn", self._compiled)
        parameters = inspect.signature(function).parameters
        #: Names of the kernel's constants, in the order of its parameters.
        self.constants = tuple(name for name in parameters if name.isupper())
        self._structures = [
            getattr(module, str(parameter.annotation), None)
            for name, parameter in parameters.items()
            if name not in self.constants
        ]
        self._variants: dict[Hashable, Any] = {}

    def launch(
        self,
        programs: int | tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        *,
        variant: Hashable,
        aligned: bool,
        interpreted: bool,
        **options: int | bool,
    ) -> None:
        """Run `programs` programs, a number or the sizes of a grid.

        - `arguments`, `constants`: in the order of the kernel's signature; structures as plain
          tuples.
        - `variant`: everything that decides the compiled code: device, dtypes, integers, constants.
        - `aligned`: whether every pointer is a multiple of 16 bytes.
        - `options`: ``num_warps``, ``num_stages``, ``launch_pdl``.
        """
        grid = _grid(programs)
        if variants.recorder is not None:
            if not interpreted:
                variants.recorder(self._compiled, self.named(arguments), constants, options)
            return
        if interpreted:
            kernel = getattr(interpreted_copy(self._module), self._name)
            with _overflow_checks(check_overflow):
                kernel[grid](*self.named(arguments), **constants)
            return
        known = self._variants.get(variant) if aligned else None
        if known is not None:
            known[grid](*arguments, *constants.values())
            return
        with variants.reported_late(self._compiled):
            compiled = self._compiled[grid](*self.named(arguments), **constants, **options)
        if aligned:
            self._variants[variant] = compiled

    def runner(self, programs: int | tuple[int, ...], *, variant: Hashable) -> Runner | None:
        """What launches a known variant for aligned arguments; None for an unknown one."""
        known = self._variants.get(variant)
        return None if known is None or variants.recorder else known[_grid(programs)]

    def named(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments of a launch, with the structures that the kernel's parameters are."""
        return [named(*pair) for pair in zip(self._structures, arguments, strict=True)]


@contextmanager
def _overflow_checks(on: bool) -> Iterator[None]:
    """Switch the interpreter's overflow checks, if this version of Triton has them."""
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if not hasattr(options, "sanitize_overflow"):
        yield
        return
    builder.options = replace(options, sanitize_overflow=on)
    try:
        yield
    finally:
        builder.options = options


@lru_cache
def interpreted_copy(module: ModuleType) -> ModuleType:
    """A second copy of a kernel's module; its functions run in Triton's interpreter.

    Triton decides whether to compile or to interpret a function when it is decorated, and one
    process may need both. The copy also interprets what the module imports from its own package.
    """
    name = f"{module.__name__}_interpreted"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    compiled = knobs.runtime.interpret
    knobs.runtime.interpret = True
    try:
        spec.loader.exec_module(copy)
    finally:
        knobs.runtime.interpret = compiled
    for function in [f for f in vars(copy).values() if isinstance(f, JITFunction)]:
        if _package(function.__module__) == _package(module.__name__):
            imported = interpreted_copy(sys.modules[function.__module__])
            setattr(copy, function.__name__, getattr(imported, function.__name__))
    return copy


def _package(module: str) -> str:
    return module.partition(".")[0]

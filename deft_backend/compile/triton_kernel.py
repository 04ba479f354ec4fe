"""`Kernel`: a Triton kernel, compiled for the GPU or interpreted on the CPU, launched quickly."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, get_type_hints

import torch
from triton import knobs
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction

from deft_backend.compile import variants


def named(structure: Any, value: Any) -> Any:
    """A plain tuple as the NamedTuple `structure`, and so for the tuples in it; else the value."""
    if not (isinstance(structure, type) and issubclass(structure, tuple)):
        return value
    hints = get_type_hints(structure)
    return structure(*(named(hints[name], field) for name, field in zip(hints, value, strict=True)))


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


class _Compiled:
    """A compiled kernel, launched by the call into the driver that Triton's own launch ends with.

    Before that call, Triton looks for hooks, allocators and metadata each time. A launch of
    markers, which does not reach the driver, shows what else the call takes.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._call: Callable[..., Any] | None = None  # None: Triton launches
        try:
            self._read(kernel)
        except (AttributeError, TypeError, ValueError):  # another version of Triton
            self._call = None

    def _read(self, kernel: Any) -> None:
        launcher, calls = kernel.run, list[tuple[Any, ...]]()
        hooks = knobs.runtime.launch_enter_hook.calls
        if launcher.global_scratch_size or launcher.profile_scratch_size or hooks:
            return
        grid, stream, arguments = (11, 12, 13), object(), ("an argument", "another")

        def note(*given: Any) -> None:
            if any(each is stream for each in given):
                calls.append(given)
            else:  # another thread's launch
                launcher.launch(*given)

        kernel._run = copy(launcher)
        kernel._run.launch = note
        try:
            kernel[grid](*arguments, stream=stream)
        finally:
            kernel._run = launcher
        (given,) = calls
        self._together = given[-1] == arguments  # whether the kernel's arguments are one tuple
        behind = (arguments,) if self._together else arguments
        self._fixed = given[4 : -len(behind)]
        if given == (*grid, stream, *self._fixed, *behind):
            self._call = launcher.launch

    def runner(self, grid: tuple[int, ...]) -> Runner:
        if self._call is None or knobs.runtime.launch_enter_hook.calls:  # a profiler's
            runner: Runner = self._kernel[grid]
            return runner
        call, fixed, together = self._call, self._fixed, self._together

        def run(*arguments: Any, stream: int | None = None) -> None:
            if stream is None:
                stream = driver.active.get_current_stream(driver.active.get_current_device())
            call(*grid, stream, *fixed, *((arguments,) if together else arguments))

        return run


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
        self._variants: dict[Hashable, _Compiled] = {}

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
            with unchecked_integers():
                kernel[grid](*self.named(arguments), **constants)
            return
        known = self._variants.get(variant) if aligned else None
        if known is not None:
            known.runner(grid)(*arguments, *constants.values())
            return
        with variants.reported_late(self._compiled):
            compiled = self._compiled[grid](*self.named(arguments), **constants, **options)
        if aligned:
            self._variants[variant] = _Compiled(compiled)

    def runner(self, programs: int | tuple[int, ...], *, variant: Hashable) -> Runner | None:
        """What launches a known variant for aligned arguments; None for an unknown one."""
        known = self._variants.get(variant)
        return None if known is None or variants.recorder else known.runner(_grid(programs))

    def named(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments of a launch, with the structures that the kernel's parameters are."""
        return [named(*pair) for pair in zip(self._structures, arguments, strict=True)]


@contextmanager
def unchecked_integers() -> Iterator[None]:
    """Without the interpreter's checks for overflow, which slow down every operation."""
    builder: Any = interpreter.interpreter_builder
    options = builder.options
    builder.options = replace(options, sanitize_overflow=False)
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
    package = module.__name__.partition(".")[0]
    for function in [f for f in vars(copy).values() if isinstance(f, JITFunction)]:
        if function.__module__.partition(".")[0] == package:
            imported = interpreted_copy(sys.modules[function.__module__])
            setattr(copy, function.__name__, getattr(imported, function.__name__))
    return copy

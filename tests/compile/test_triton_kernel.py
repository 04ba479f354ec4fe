"""Launches of a kernel that Triton has compiled, and the clock of compilations."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import CompiledKernel, LazyDict
from triton.runtime import driver, interpreter

from deft_backend.compile import clock, variants
from deft_backend.compile.triton_kernel import Kernel, _Compiled, addresses_of, named


class Inner(NamedTuple):
    size: int


class Structure(NamedTuple):
    first: int
    inner: Inner


def signature(pointer, held: "Structure", count, BLOCK, ROWS):
    """Triton reads names and annotations only."""


class Compiled:
    """In place of Triton's function: notes each launch, and returns a compiled kernel."""

    fn = staticmethod(signature)

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*given, **named):
            self.launches.append((grid, given, named))
            return self if named else None

        return launch


def test_the_drivers_launch_takes_what_triton_gives_it(monkeypatch):
    """Triton's own classes, but for the driver."""
    calls = []
    launcher = object.__new__(CudaLauncher)
    sizes = {
        f"{of}_scratch_{what}": 0 for of in ("global", "profile") for what in ("size", "align")
    }
    vars(launcher).update(sizes, num_ctas=1, gsan_enabled=False, launch=lambda *a: calls.append(a))
    vars(launcher).update(launch_cooperative_grid=False, launch_pdl=True)
    vars(launcher).update(arg_annotations=["how"], kernel_signature=b"signature")
    compiled = object.__new__(CompiledKernel)
    vars(compiled).update(_run=launcher, module=None, function=77, packed_metadata=(4, 1, 1024))
    vars(compiled).update(name="kernel", src=None)
    monkeypatch.setattr(compiled.__class__, "_init_handles", lambda self: None)
    active = SimpleNamespace(
        allocate_default_profile_scratch=None,
        get_current_device=lambda: 3,
        get_current_stream=lambda device: 40 + device,
    )
    monkeypatch.setattr(driver, "_active", active)

    def launched(runner, **stream):
        calls.clear()
        runner(8, (9, 10), **stream)
        (call,) = calls
        return [each for each in call if not isinstance(each, LazyDict)]  # metadata for hooks

    known = _Compiled(compiled)
    assert (calls, compiled._run) == ([], launcher)
    for stream in {"stream": 5}, {}:
        assert launched(known.runner((6, 2, 1)), **stream) == launched(compiled[6, 2, 1], **stream)
    own = compiled[1, 1, 1].__qualname__
    assert known.runner((1, 1, 1)).__qualname__ != own
    with monkeypatch.context() as patched:  # a profiler
        patched.setattr(knobs.runtime.launch_enter_hook, "calls", [calls.append])
        assert known.runner((1, 1, 1)).__qualname__ == own
    vars(launcher)["profile_scratch_size"] = 1
    assert _Compiled(compiled).runner((1, 1, 1)).__qualname__ == own


def test_a_known_variant_with_aligned_pointers_skips_triton():
    launches = []
    compiled = Compiled(launches)
    kernel = Kernel(SimpleNamespace(Structure=Structure, name=compiled), "name")
    assert kernel.constants == ("BLOCK", "ROWS")
    arguments, constants = ("p", (1, (2,)), 3), {"BLOCK": 16, "ROWS": 4}

    def launch(programs, variant, aligned):
        launches.clear()
        given = {"variant": variant, "aligned": aligned, "interpreted": False}
        kernel.launch(programs, arguments, constants, **given, num_warps=8)
        return launches

    whole = "p", Structure(1, Inner(2)), 3
    compiling = (whole, {**constants, "num_warps": 8})
    assert launch(5, "v", aligned=False) == [((5, 1, 1), *compiling)]
    assert launch(5, "v", aligned=True) == [((5, 1, 1), *compiling)]
    assert launch((5, 6), "v", aligned=True) == [((5, 6, 1), (*arguments, 16, 4), {})]
    assert launch((5, 6, 7), "v", aligned=False) == [((5, 6, 7), *compiling)]
    assert launch(5, "other", aligned=True) == [((5, 1, 1), *compiling)]
    with variants.recorded():
        variants.recorder = lambda *given: launches.append(given)
        assert launch(5, "v", aligned=True) == [
            (compiled, list(whole), constants, {"num_warps": 8})
        ]
        assert kernel.runner(5, variant="v") is None
    kernel.runner(5, variant="v")("p")
    assert launches[-1] == ((5, 1, 1), ("p",), {})
    assert kernel.runner(5, variant="unknown") is None
    with pytest.raises(ValueError, match="zip"):
        kernel.named(arguments[:2])


def test_structures_and_addresses():
    assert named(Structure, (1, (2,))) == Structure(1, Inner(2))
    assert (named(None, 3), named(int, 4)) == (3, 4)
    tensor = torch.zeros(2)
    assert addresses_of((tensor, (1, tensor))) == (tensor.data_ptr(), (1, tensor.data_ptr()))


def test_only_the_outermost_compilation_of_a_thread_counts(monkeypatch):
    now = iter([1.0, 3.5, 10.0, 11.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    found = clock.CompileClock()
    with found.running(), found.running():
        assert found.seconds == 0.0
    assert found.seconds == 2.5
    with pytest.raises(ValueError, match="x"), found.running():
        raise ValueError("x")
    assert found.seconds == 3.5


@pytest.mark.parametrize("before", [False, True])
def test_a_launch_checks_no_integers(before, unchecked_integers, monkeypatch):
    builder = interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=before)
    monkeypatch.setattr(builder, "options", options)
    with unchecked_integers():
        assert not builder.options.sanitize_overflow
    assert builder.options is options

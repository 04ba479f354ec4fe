"""Other processes fill the cache that this one launches from, until a time or the end."""

import multiprocessing
import os
import signal
import time

import pytest
import triton
from triton import knobs

from deft_backend.compile.in_processes import compiled_in_processes
from deft_backend.compile.variants import (
    ForArchitecture,
    Pointer,
    Variant,
    compile_all,
    compiling_for,
)


@triton.jit
def fill(x, value):
    triton.language.store(x, value)


@triton.jit
def broken(x, value):
    x.no_such_operation()


def code(kernel, value=2):
    variant = Variant(kernel, (Pointer(triton.language.int32, True), value), (), ())
    return ForArchitecture(variant, 90)


def soon():
    return time.monotonic() + 60.0


@pytest.fixture
def empty_cache(tmp_path):
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def test_other_processes_fill_the_cache(empty_cache):
    """A kernel that does not compile keeps nobody waiting; its launch raises the error."""
    good = [code(fill), code(fill, 16)]
    with compiled_in_processes([code(broken), *good]) as ready:
        assert ready([code(broken)], soon())
        assert ready(good, soon())
    with compiling_for(90):
        done = compile_all(each.variant for each in good)
    assert (done.compiled, done.cached) == (0, 2)


def test_the_time_ends(empty_cache):
    with compiled_in_processes([code(fill)]) as ready:
        assert not ready([code(fill)], 0.0)
        assert ready([], 0.0)


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_is_killed(busy, empty_cache, monkeypatch):
    """As by the kernel, where memory is short; waiting ends with the last process."""
    if busy:
        monkeypatch.setattr(Variant, "compile", lambda self: os.kill(os.getpid(), signal.SIGKILL))
    with compiled_in_processes([code(fill)]) as ready:
        if not busy:
            assert ready([code(fill)], soon())
        for process in multiprocessing.active_children():
            process.kill()
        assert ready([code(fill)], soon())
    assert not multiprocessing.active_children()

"""`host_jit`: compiles once, caches the code if possible, and is correct without a cache."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba.core import caching

import deft_backend
from deft_backend.compile import host_jit as jit
from deft_backend.compile.clock import COMPILING

SOURCE = """
from deft_backend.compile.host_jit import host_jit

@host_jit
def twice(number: int) -> int:
    return 2 * number

@host_jit
def four_times(number: int) -> int:
    return twice(twice(number))
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")
    path = tmp_path / "made.py"
    path.write_text(SOURCE)
    return path


def load(path):
    """The module as a new process would import it."""
    spec = importlib.util.spec_from_file_location("made", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_compiled_code_is_kept(source):
    first = load(source)
    assert (first.twice(4), hits(first.twice)) == (8, 0)
    again = load(source)
    assert (again.twice(4), hits(again.twice)) == (8, 1)


def test_the_clock_counts_what_the_first_call_waits_for(source):
    """Compilation, and the load from disk; a call of compiled code costs nothing."""
    began, before = time.perf_counter(), COMPILING.seconds
    twice = load(source).twice
    twice(4)
    spent = COMPILING.seconds - before
    assert 0 < spent <= time.perf_counter() - began
    twice(5)
    assert COMPILING.seconds - before == spent
    with COMPILING.running(), COMPILING.running():
        twice(2.5)
    assert COMPILING.seconds - before <= time.perf_counter() - began


def test_a_change_of_the_package_drops_kept_code(source, monkeypatch):
    """A function's own file does not show changes of the functions and constants that it uses."""
    load(source).twice(4)
    monkeypatch.setattr(jit, "sources_digest", lambda module: "changed")
    changed = load(source)
    assert (changed.twice(4), hits(changed.twice)) == (8, 0)


def test_each_version_of_numba_keeps_its_own_code(source, monkeypatch):
    """Two environments of one checkout may have different versions."""
    load(source).twice(4)
    monkeypatch.setattr(jit.numba, "__version__", "0.0.0")
    other = load(source)
    assert (other.twice(4), hits(other.twice)) == (8, 0)
    monkeypatch.undo()
    again = load(source)
    assert (again.twice(4), hits(again.twice)) == (8, 1)


def test_damaged_files_are_compiled_anew(source):
    load(source).twice(4)
    for suffix in ("nbc", "nbi"):
        kept = list(source.parent.rglob(f"*.{suffix}"))
        assert kept
        for path in kept:
            path.write_bytes(b"damaged")
        damaged = load(source)
        assert (damaged.twice(4), hits(damaged.twice)) == (8, 0)


def test_code_of_other_types_is_not_taken(source):
    """Two processes that write the index at the same time can mix up their entries."""
    module = load(source)
    module.twice(4)
    module.twice(0.5)
    first, second = sorted(source.parent.rglob("*.nbc"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    mixed = load(source)
    assert (mixed.twice(4), mixed.twice(0.5), hits(mixed.twice)) == (8, 1.0, 0)


def test_calls_in_python_can_be_compiled_elsewhere(source, monkeypatch):
    """Only functions that Python calls are listed. Code compiled for the list serves the calls."""
    first = load(source)
    monkeypatch.setitem(sys.modules, "deft_backend.made", first)
    compiled = first.four_times
    with jit.calls_in_python() as calls:
        assert [first.four_times(value) for value in (1, 2, 0.5)] == [4, 8, 2.0]
    assert first.four_times is compiled
    assert compiled.stats.cache_misses == {}
    assert [str(call.types) for call in calls] == ["(int64,)", "(float64,)"]
    for call in calls:
        call.compile()
    again = load(source)
    assert ([again.four_times(value) for value in (1, 0.5)], hits(again.four_times)) == (
        [4, 2.0],
        2,
    )


def test_no_folder_for_the_cache(source, monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert load(source).twice(4) == 8
    assert not list(source.parent.rglob("*.nb?"))


def test_a_full_disk(source, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", full)
    module = load(source)
    assert (module.twice(4), module.twice(0.5)) == (8, 1.0)


def test_compilation_can_be_switched_off(source):
    code = "import made; print(made.twice(4), type(made.twice).__name__)"
    paths = [str(source.parent), str(Path(deft_backend.__file__).parent.parent)]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.stdout.split() == ["8", "function"]


def test_the_digest_covers_what_a_layer_may_import():
    digests = [
        jit.sources_digest(f"deft_backend.{name}")
        for name in ("forest.nodes", "policies.auto", "planner.host", "attention")
    ]
    assert len(set(digests)) == 4
    assert jit.sources_digest("deft_backend.forest.prefix_tree") == digests[0]

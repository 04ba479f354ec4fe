"""Processes that need the same kernels at the same time compile each of them once."""

import multiprocessing

from test_variants import HOPPER, reductions, server
from triton import knobs

from deft_backend.compile import kernel_folder
from deft_backend.compile.variants import compile_all, compiling_for
from deft_backend.settings.config import Settings

# A forked process has Triton's modules already; those of a real server import them anew.
FORK = multiprocessing.get_context("fork")


def compiled_into(folder, own, wanted):
    """Compile as a rank does, whose own cache of Triton is another folder."""
    with knobs.cache.scope(), compiling_for(90):
        knobs.cache.dir = str(own)
        cache = kernel_folder.SharedCache(folder)
        with cache.in_use():
            done = compile_all(wanted, threads=2, shared=cache)
        assert knobs.cache.dir == str(own)
    return done


def rank(folder, own, wanted, ready, answer):
    ready.wait()
    done = compiled_into(folder, own, wanted)
    answer.send((done.compiled, done.cached, [kernel.hash for kernel in done.kernels]))


def test_each_kernel_is_compiled_by_one_process(tmp_path):
    planner = [v for v in server("vllm").variants(HOPPER, Settings()) if v.name == "find_nodes"]
    wanted = [*planner[:2], *reductions(2)]
    assert len(set(wanted)) == 4
    ready, pipes, ranks = FORK.Barrier(3), [], []
    for number in range(3):
        here, there = FORK.Pipe()
        own = tmp_path / f"own-{number}"
        ranks.append(
            FORK.Process(target=rank, args=(tmp_path / "shared", own, wanted, ready, there))
        )
        ranks[-1].start()
        pipes.append(here)
    answers = [pipe.recv() for pipe in pipes if pipe.poll(120)]
    for process in ranks:
        process.join(10)
        assert process.exitcode == 0
    assert sum(compiled for compiled, _, _ in answers) == 4
    assert [compiled + cached for compiled, cached, _ in answers] == [4, 4, 4]
    (hashes,) = {tuple(kernels) for _, _, kernels in answers}
    assert len(set(hashes)) == 4
    assert not any((tmp_path / f"own-{number}").exists() for number in range(3))


def test_a_process_compiles_what_a_stopped_one_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_folder, "PATIENCE", 2.0)
    wanted = reductions(1)
    held = kernel_folder.SharedCache(tmp_path / "shared").lock(repr(wanted[0]), wait=False)
    with held as mine:
        assert mine
        done = compiled_into(tmp_path / "shared", tmp_path / "own", wanted)
    assert (done.compiled, done.seconds >= 2.0) == (1, True)

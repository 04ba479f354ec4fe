"""Rows of the kernel benchmark, processes that share a GPU, and the commands."""

import json
import multiprocessing
import re
import time
from contextlib import contextmanager
from functools import partial
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

import commands
from benchmarks.__main__ import app_of
from benchmarks.kernel import measure_case
from benchmarks.kernel.methods import OURS
from benchmarks.kernel.turns import Turns

CPU = ["--device", "cpu", "--quick"]
SMALL = [*CPU, "--with", "heads=2/1", "--with", "head_dim=64"]
run = partial(commands.run, app=app_of([]))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_checks_results_on_the_cpu(processes, tmp_path):
    trees = ["1,2 9,3", "2 5"]
    common = ["kernel", *SMALL, *(word for tree in trees for word in ("--tree", tree))]
    code, out, _ = run(*common, "--processes", processes, "--out", str(tmp_path))
    assert code == 0
    assert "without fa3: needs an NVIDIA GPU" in out
    header, rows = json.loads((tmp_path / "kernel-cpu.json").read_text()).values()
    assert header["complete"] is True
    assert header["runs"][0]["options"]["heads"] == ["2/1"]
    assert [row["workload"] for row in rows] == trees
    for row in rows:
        assert row["us"] == {"deft": None, "flash-decoding": None}
        assert all(0 < error < 1e-3 for error in row["error"].values())


def test_a_process_that_measures_has_the_gpu_for_itself():
    """While others prepare, wait to measure, or come back from it; nobody waits forever."""
    turns, doing, seen = Turns(multiprocessing.get_context("spawn")), {}, []

    def use(number, what):
        doing[number] = what
        time.sleep(1e-4)
        others = [each for at, each in [*doing.items()] if at != number]
        doing[number] = None
        return others

    def work(number):
        for _ in range(20):
            with turns.shared():
                use(number, "prepares")
                with turns.alone():
                    seen.extend(use(number, "measures"))
                use(number, "prepares")

    threads = [Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(seen) > 160
    assert set(seen) == {None}


def test_a_method_is_timed_alone(monkeypatch):
    """After what its own process has launched."""
    done = []

    class Recorded:
        @contextmanager
        def alone(self):
            done.append("alone")
            yield
            done.append("shared")

    monkeypatch.setattr(measure_case, "_turns", Recorded())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    monkeypatch.setattr(measure_case, "launch_us", lambda *given: done.append(given))
    setup = SimpleNamespace(device="cuda", rep_ms=5)
    measure_case._alone_us("a launch", setup)
    assert done == ["waited", "alone", ("a launch", 5), "shared"]


def test_a_wrong_result_of_ours_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_case, "TOLERANCE", {torch.float16: 1e-9})
    code, _, err = run(
        "kernel", *SMALL, "--tree", "1,2 3,2", "--with", "peers=none", "--out", str(tmp_path)
    )
    assert code == 1
    assert re.search(r"wrong own, 1,2 3,2, heads 2/1: wrong result: relative error", err)
    assert list(json.loads((tmp_path / "kernel-cpu.json").read_text())["rows"][0]["us"]) == [OURS]

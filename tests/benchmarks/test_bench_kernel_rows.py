"""Rows of the kernel benchmark: files, merges, and the commands."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import commands
from benchmarks.__main__ import app_of
from benchmarks.kernel import measure_case
from benchmarks.kernel.kernel_rows import merged, read_rows
from benchmarks.kernel.methods import OURS
from benchmarks.row_files import RowsError

HEADER = {"device": "NVIDIA H100 80GB HBM3 (CUDA 13.0)", "versions": {}, "commit": "c"}


def row(name="1,20 4000,200", **changes):
    made = {"set": "deft", "workload": name, "heads": "32/8", "head_dim": 128, "dtype": "fp16"}
    made |= {"page_size": 1, "layout": "shuffled", "policy": "auto", "us": {"deft": 20.0}}
    return {**made, **changes}


CPU = ["--device", "cpu", "--quick"]
SMALL = [*CPU, "--with", "heads=2/1", "--with", "head_dim=64"]
run = partial(commands.run, app=app_of([]))


def test_merging_keeps_the_later_row_and_every_run():
    first = (Path("a"), [row(), row("one")], {**HEADER, "complete": True, "runs": [{"part": 1}]})
    newer = row("one", us={"deft": 1.0})
    second = (Path("b"), [newer, row("two")], {**HEADER, "complete": False, "runs": [{"part": 2}]})
    rows, header = merged([first, second])
    assert rows == [row(), newer, row("two")]
    assert header["runs"] == [{"part": 1}, {"part": 2}]
    assert header["complete"] is False
    # Another dtype, page size or policy is another case.
    other = (Path("c"), [row(dtype="bf16"), row(page_size=16), row(policy="deft-node")], HEADER)
    assert len(merged([first, other])[0]) == 5


@pytest.mark.parametrize("name", ["device", "versions", "commit"])
def test_runs_of_different_machines_or_builds_do_not_merge(name):
    with pytest.raises(RowsError, match=f"b was measured with {name} other, a with"):
        merged([(Path("a"), [row()], HEADER), (Path("b"), [row()], {**HEADER, name: "other"})])


def test_checks_results_on_the_cpu_and_merges(tmp_path):
    common = ["kernel", *SMALL, "--tree", "1,2 9,3", "--tree", "2 5"]
    for part in ("1/2", "2/2"):
        code, out, _ = run(*common, "--part", part, "--out", str(tmp_path / part[0]))
        assert code == 0
        assert "without fa3: needs an NVIDIA GPU" in out
    first, header = read_rows(tmp_path / "1" / "kernel-cpu.json")
    assert header["complete"] is True
    assert header["runs"][0]["options"]["heads"] == ["2/1"]
    assert first[0]["workload"] == "1,2 9,3"
    assert first[0]["us"] == {"deft": None, "flash-decoding": None}
    assert all(0 < error < 1e-3 for error in first[0]["error"].values())

    both = tmp_path / "both.json"
    files = [str(tmp_path / part / "kernel-cpu.json") for part in "12"]
    code, _, _ = run("kernel-merge", *files, "--out", str(both))
    assert code == 0
    assert [found["workload"] for found in read_rows(both)[0]] == ["1,2 9,3", "2 5"]

    code, _, err = run("kernel-merge", str(tmp_path / "none.json"), "--out", str(both))
    assert code == 2
    assert "cannot read" in err


def test_a_wrong_result_of_ours_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_case, "TOLERANCE", {torch.float16: 1e-9})
    code, _, err = run(
        "kernel", *SMALL, "--tree", "1,2 3,2", "--with", "peers=none", "--out", str(tmp_path)
    )
    assert code == 1
    assert re.search(r"wrong own, 1,2 3,2, heads 2/1: wrong result: relative error", err)
    assert list(read_rows(tmp_path / "kernel-cpu.json")[0][0]["us"]) == [OURS]

"""The fault harness: its verdicts, its planted faults, and the page drawn from its record."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.row_files import read_rows
from integration_tests.faults.__main__ import BEGIN, BOTH, END, FAULTS, drawn_into
from integration_tests.faults.run import is_ok
from integration_tests.faults.tested_server import Judged

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "integration_tests" / "faults" / "inside"
RECORD = ROOT / "docs" / "results" / "faults-cpu.json"
PAGE = ROOT / "docs" / "reliability.md"

GOOD = {
    "fault": "poison", "host": "vllm", "injected": 3, "right": 6, "wrong": 0, "lost": 0,
    "cut": 0, "after": {"right": 3, "wrong": 0, "lost": 0, "cut": 0},
}  # fmt: skip


def test_only_right_answers_to_a_fault_that_happened_are_as_promised():
    assert is_ok(GOOD)
    for change in (
        {"injected": 0}, {"wrong": 1}, {"lost": 1}, {"processes_left": 1}, {"link_followed": True},
        {"after": {"wrong": 1, "lost": 0, "cut": 0}},
        {"cut": 1}, {"injected": {"poison": 1, "flush": 0}},
    ):  # fmt: skip
        assert not is_ok({**GOOD, **change}), change
    assert is_ok({**GOOD, "fault": "sigkill", "lost": 6})
    assert not is_ok({**GOOD, "fault": "sigkill", "wrong": 1})


def test_tokens_that_came_before_a_cut_are_judged():
    found = Judged()
    for ids in ([1, 2, 3], [1, 2], [1, 9], [], [1, 2, 3, 4]):
        found.add(ids, [1, 2, 3])
    assert (found.right, found.cut, found.wrong, found.lost) == (1, 1, 2, 1)


def test_the_page_shows_the_record():
    rows, _ = read_rows(RECORD, ("fault", "host", "ok", "run"), "faults")
    assert drawn_into(PAGE.read_text(), rows) == PAGE.read_text(), (
        "run: python -m integration_tests.faults --draw --out docs/results/faults-cpu.json"
    )


def test_the_record_names_its_runs_and_known_faults():
    rows, header = read_rows(RECORD, ("fault", "host", "ok", "run"), "faults")
    runs = {run["date"]: run for run in header["runs"]}
    assert all(run["commit"] and run["host"] in BOTH for run in runs.values())
    assert {row["run"] for row in rows} == set(runs)
    assert all(runs[row["run"]]["host"] == row["host"] for row in rows)
    assert all(row["host"] in FAULTS[row["fault"]].get("hosts", BOTH) for row in rows)
    assert all(row["ok"] == is_ok(row) for row in rows)


def test_a_failed_fault_shows_on_the_page():
    assert "**not as promised**" in drawn_into(BEGIN + END, [{**GOOD, "ok": False}])
    assert "9 right" in drawn_into(BEGIN + END, [{**GOOD, "ok": True}])
    with pytest.raises(ValueError, match="lacks"):
        drawn_into("no marks", [])


PLANTED = """
import torch
from pathlib import Path
import os
from deft_backend import TreeAttention, forest_from_page_tables
folder = Path(os.environ["FAULTS"])
def count(name):
    return len((folder / f"{name}.done").read_text().split())
table = torch.tensor([[0, 1, 2, 9], [0, 1, 3, 9]], dtype=torch.int32)
lens = torch.tensor([5, 6], dtype=torch.int32)
k, v = torch.randn(2, 10, 2, 2, 64)
q = torch.randn(2, 4, 64)
made = dict(num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
            page_size=2, max_batch=2)
attention = TreeAttention(**made)
forest = forest_from_page_tables(table, lens, 2)
attention.plan(forest)
right = attention.run(q, k, v, table, lens)
before = (k.clone(), v.clone(), table.clone())
(folder / "poison").touch()
assert torch.equal(attention.run(q, k, v, table, lens), right)
attention.plan_on_device(table, lens)
assert torch.allclose(attention.run(q, k, v, table, lens), right, atol=1e-6)
assert all(torch.equal(a, b) for a, b in zip((k, v, table), before))
assert count("poison") == 2
(folder / "poison").unlink()
for name, act in (("planner", lambda: attention.plan(forest)),
                  ("launch", lambda: attention.run(q, k, v, table, lens)),
                  ("no-memory", lambda: TreeAttention(**made)),
                  ("no-compiler", lambda: TreeAttention(**made))):
    (folder / name).touch()
    try:
        act()
    except Exception as error:
        assert "planted" in str(error), name
    else:
        raise SystemExit(f"{name} did not happen")
    (folder / name).unlink()
    assert count(name) == 1
print("all planted")
"""


STATE = """
import json, os
from pathlib import Path
from deft_backend.telemetry.counters import Decoded
from deft_backend.telemetry.state import ServerState, StateWriter
folder = Path(os.environ["FAULTS"])
state = ServerState(1, 0, "h", "1", "b", "auto", "cpu", "float32", 2, 4, 2, 64, 4)
writer = StateWriter(state, folder / "state")
(folder / "clock").touch()
writer.look()
written = json.loads(writer.path.read_text())["updated"]
import time
assert abs(written - time.time()) > 80_000
(folder / "clock").unlink()
(folder / "full-disk").touch()
state.count(Decoded("decode", 1, 10), "small")
writer.look()
assert (folder / "full-disk.done").exists()
assert not json.loads(writer.path.read_text())["steps_host"]
print("both planted")
"""


@pytest.mark.parametrize(("script", "said"), [(PLANTED, "all planted"), (STATE, "both planted")])
def test_every_fault_inside_a_server_can_be_planted(tmp_path, script, said):
    environment = {
        **os.environ, "FAULTS": str(tmp_path), "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(INSIDE), str(ROOT))),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert result.stdout.strip() == said, result.stderr[-2000:]

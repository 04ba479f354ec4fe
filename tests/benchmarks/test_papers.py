"""The papers' tables without a GPU: every method is right on a small tree, and counts are right."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app_of
from benchmarks.kernel.sets import SETS, read_set
from benchmarks.papers import counters
from benchmarks.papers.command import counted_io, counted_work
from benchmarks.papers.workloads import THOUGHTS, TOKEN_TREES

ON_A_GPU = {"fasttree-artifact", "fa2", "fa3", "fa3-cascade", "flashinfer"}
ON_A_GPU |= {"cascade", "radix-attention"}


@pytest.fixture
def recordings(tmp_path):
    """Of thoughts: a prompt of 8 tokens, thoughts of 3 and 2, and one of 1 behind the first."""
    for name in THOUGHTS:
        shutil.copy(Path(__file__).with_name("thoughts.json"), tmp_path / f"{name}.json")
    for name in TOKEN_TREES:
        records = [{"prompt": "x" * 40, "Accept_length": [2, 1]}]
        content = {"Tree_Structure": [[0], [1], [0, 0]], "Records": records}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_every_method_of_every_table_is_right(recordings):
    """One parameter of each policy that has one, on a small tree."""
    read = [read_set(name, recordings)[0] for name, of in SETS.items() if "place" in of]
    given = [peer for spec in read for peer in spec.peers]
    first = {peer.split("/")[0]: peer for peer in sorted(given, reverse=True)}
    others = {"deft-flatten/32", "fasttree/10", "fasttree/-10", "oracle"}
    methods = sorted({*first.values(), *others} - ON_A_GPU)
    words = f"kernel --tree '1,2,4 32,16,5' --device cpu --quick --out {recordings}"
    words += f" --with heads=4/2 --with dtype=bf16 --with peers={','.join(methods)}"
    done = CliRunner().invoke(app_of([]), shlex.split(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (row,) = json.loads((recordings / "kernel-cpu.json").read_text())["rows"]
    assert row["skipped"] == {}
    assert row["error"].keys() == {"deft", *methods}
    # The dtype is bfloat16, with 8 bits of mantissa.
    assert max(row["error"].values()) < 2e-2


def test_kv_of_recordings_is_counted_step_by_step(recordings):
    """By hand: step by step, each thought that decodes attends to its path; stored is the union."""
    rows = {row["workload"]: row for row in counted_io(recordings)}
    # Iterations 1 and 2: both thoughts, 8 + n each; 3: the first alone; 4: the thought behind it.
    attended = (9 + 9) + (10 + 10) + 11 + 12
    stored = (8 + 2) + (8 + 4) + 11 + 12
    assert rows[THOUGHTS[0]]["tokens_attended"] == attended
    assert rows[THOUGHTS[0]]["tokens_stored"] == stored
    # 10 tokens of prompt and the root; candidates at depth 1, 1 and 2. Then 2 tokens more.
    tree = [(context + 4 * context + 1 + 1 + 2 - context, context + 3) for context in (11, 13)]
    assert rows[TOKEN_TREES[0]]["tokens_attended"] == sum(a for a, _ in tree)
    assert rows[TOKEN_TREES[0]]["tokens_stored"] == sum(s for _, s in tree)
    # 20 queries see 4,000 + 20 n tokens in step n. The paper's Table 17 has 1.05 over 1.68 TB.
    shared = [4000 + 20 * n for n in range(1, 401)]
    assert rows["b=20"]["tokens_stored"] == sum(shared)
    assert rows["b=20"]["medusa_over_kv"] == round(8 * 20 / 256, 2)


def test_work_of_plans_is_counted_item_by_item(recordings):
    """20 queries on 4,000 tokens: two tiles of 16; alone, a query fills half a tile."""
    rows = {(row["workload"], row["policy"]): row for row in counted_work(recordings)}
    alone, node = rows["b=20", "flash-decoding"], rows["b=20", "deft-node"]
    assert (alone["loaded"], alone["products"]) == (10.5, 2.0)
    assert (node["items"], node["loaded"]) == (22, 1.5)
    assert node["products"] == round((2 * 4000 * 16 + 20 * 200 * 2) / (20 * 4200), 3)
    # The masked tile holds 16 queries, and no range has items of its own.
    flat = rows["b=20", "deft-flatten"]
    assert flat["products"] == round((2 * 4000 * 16 + 4000 * 16) / (20 * 4200), 3)


def test_counters_are_summed_over_kernels():
    """`ncu --csv`: a line a metric and kernel, behind the program's own output."""
    lines = ["something else", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for kernel, values in (("0", (1000, 7000, 4000, 10, 50)), ("1", (500, 900, 1000, 60, 20))):
        lines += [
            f'"{kernel}","k","{metric}","unit","{value:,}"'
            for metric, value in zip(counters.METRICS, values, strict=True)
        ]
    assert counters.summed(lines) == {
        "kernels": 2,
        "time_us": 5.0,
        "dram_read_bytes": 1500,
        "l2_read_bytes": 7900,
        "sm_percent": (10 * 4000 + 60 * 1000) / 5000,
        "dram_percent": (50 * 4 + 20) / 5,
    }
    assert counters.summed(["==ERROR== no permission"])["kernels"] == 0

"""The benchmark of the hooks' time: it runs the real hooks and writes a row for each batch."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_file_holds_what_a_replayed_step_takes(tmp_path):
    """In its own process, because it replaces the host's replay by an empty one."""
    pytest.importorskip("sglang")
    out = tmp_path / "new" / "hooks.json"
    command = [sys.executable, "-m", "benchmarks", "step-hooks", "--out", str(out)]
    subprocess.run(
        [*command, "--repeats", "5"], check=True, capture_output=True, cwd=ROOT, timeout=300
    )
    found = json.loads(out.read_text())
    assert found["header"]["looks_a_second"] == 4
    assert found["header"]["look_us"] > 0
    assert [(row["requests"], row["context"]) for row in found["rows"]] == [
        (requests, context) for requests in (2, 32, 256, 1024) for context in (2048, 65536)
    ]
    for row in found["rows"]:
        assert row["without_us"] > 0
        assert row["added_us"] == pytest.approx(row["with_hooks_us"] - row["without_us"], abs=2e-3)
    # Compare the two in most rows, because another process may delay any single row.
    assert statistics.median(row["added_us"] for row in found["rows"]) > 0

"""The soak adds slices up, goes on after an interruption, and sees memory that grows."""

import json

import pytest

from benchmarks import soak as soaks
from benchmarks.e2e.choice import ModelChoice, ServerChoice
from benchmarks.soak import Soak, is_level, level, run, summary, totals


def row(part=1, wrong=0, grows=0.0, error=None):
    memory = [{"s": s, "rss_mib": 1000.0 + grows * s, "gpu_mib": None} for s in range(0, 101, 10)]
    return {
        "host": "sglang", "model": "tiny", "error": error,
        "detail": {
            "traffic": {"seconds": 50.0, "finished": 9, "aborted": 1, "failures": 0, "evicted": 2},
            "checked": {"answers": 5, "tokens": 60, "ties": 0, "wrong": wrong}, "memory": memory,
            "log_trouble": 0,
        },
    }  # fmt: skip


def test_a_slice_is_ok_only_if_nothing_is_wrong_and_memory_is_level():
    assert totals([summary(row(), 1)])["ok"]
    for bad in (row(wrong=1), row(grows=2.0), row(error="died")):
        assert not totals([summary(row(), 1), summary(bad, 2)])["ok"]
    unchecked = row()
    del unchecked["detail"]["checked"]
    assert not totals([summary(unchecked, 1)])["ok"]
    assert not totals([])["ok"]


def test_what_memory_did_in_the_first_fifth_does_not_count():
    samples = [{"s": s, "rss_mib": min(1000.0, 50.0 * s)} for s in range(0, 101, 5)]
    found = level(samples, "rss_mib")
    assert found == {"after_first_fifth": 1000.0, "end": 1000.0, "growth": 0.0}
    assert is_level(found)
    assert not is_level({"after_first_fifth": 1000.0, "end": 1100.0, "growth": 100.0})
    assert level(samples, "gpu_mib") is None


def test_other_processes_on_the_gpu_are_no_growth():
    """Samples of the GPU's memory count them; samples of the server's own memory do not."""
    used = [10.0, 30.0, 90.0, 31.0, 70.0, 70.0, 90.0, 80.0, 31.0, 99.0]
    samples = [{"s": float(at), "rss_mib": mib, "gpu_mib": mib} for at, mib in enumerate(used)]
    assert level(samples, "gpu_mib") == {"after_first_fifth": 31.0, "end": 31.0, "growth": 0.0}
    assert level(samples, "rss_mib") == {"after_first_fifth": 90.0, "end": 99.0, "growth": 9.0}
    samples[8]["gpu_mib"] = 99.0
    assert level(samples, "gpu_mib") == {"after_first_fifth": 31.0, "end": 99.0, "growth": 68.0}


def test_a_later_run_goes_on_where_the_first_ended(tmp_path, monkeypatch):
    parts = []

    def fake(soak, part, seconds, say):
        parts.append((part, seconds))
        if len(parts) == 2:
            raise KeyboardInterrupt
        return {**summary(row(), part), "seconds": seconds}

    monkeypatch.setattr(soaks, "_slice", fake)
    out = tmp_path / "soak.json"
    asked = Soak(out, 100.0, 40.0, ServerChoice(), ModelChoice(), "soak")
    with pytest.raises(KeyboardInterrupt):
        run(asked, lambda line: None)
    total = run(asked, lambda line: None)
    assert parts == [(1, 40.0), (2, 40.0), (2, 40.0), (3, 20.0)]
    assert (total["seconds"], total["ok"]) == (100.0, True)
    content = json.loads(out.read_text())
    assert [found["part"] for found in content["rows"]] == [1, 2, 3]
    assert len(content["header"]["runs"]) == 3

"""The generated page of results: the committed one is current, and its ratios are right."""

import json

from benchmarks.results import FOLDER, PAGE, REPRODUCTION, draw_page, with_tables


def test_the_committed_pages_are_current():
    page, text = draw_page(FOLDER), REPRODUCTION.read_text(encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "python -m benchmarks results"
    assert text == with_tables(text, page), "python -m benchmarks results"


def lines_of(folder, name, content, title):
    """Cells of the lines of one section, for a folder with one record."""
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    section = draw_page(folder).split(f"## {title}\n\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[2:]]


def served(backend, prefix, tpot_ms, **changed):
    row = {"workload": "few-shot" if prefix else "unshared", "prefix": prefix, "branches": 32}
    row |= {"suffix": 64, "gen": 8, "host": "sglang", "backend": backend, "model": "m"}
    row |= {"options": "", "tp": 1, "tpot_ms": tpot_ms, "ttft_ms": 2 * tpot_ms, "error": None}
    return {**row, "detail": {}, **changed}


HEADER = {"device": "NVIDIA H200 (CUDA 13.0)", "date": "2026-11-28T10:00:00", "commit": "abc"}


def test_servers_are_compared_case_by_case(tmp_path):
    """A row that failed, and a case that only one backend served, give no ratio."""
    rows = [
        served("deft", 4096, 4.0),
        served("fa3", 4096, 10.0),
        served("deft", 0, 9.0),
        served("fa3", 0, 10.0),
        served("deft", 100, 1.0),
        served("fa3", 4096, 1.0, error="lost"),
    ]
    content = {"header": HEADER, "rows": rows}
    first, second = lines_of(tmp_path, "e2e-x.json", content, "Servers, end to end")
    assert first[0] == "[e2e-x](e2e-x.json), H200"
    assert first[1] == "sglang: m"
    assert second[:2] == ["", ""], "repeats are blank"
    assert first[5:7] == ["4.00, 10.00", "0.40"]
    assert second[5:7] == ["9.00, 10.00", "0.90"]
    assert first[2] == "few-shot, 4,096 × 32"
    assert second[2] == "unshared"


def test_kernels_have_the_geometric_mean_and_the_range(tmp_path):
    rows = [
        {"set": "s", "heads": "32/8", "dtype": "bf16", "us": {"deft": ours, "fa3": theirs}}
        for ours, theirs in ((1.0, 4.0), (4.0, 4.0), (2.0, None))
    ]
    content = {"runs": [{"header": HEADER, "rows": rows}, {"header": HEADER, "rows": rows[:1]}]}
    first, second = lines_of(tmp_path, "kernel-x.json", content, "Kernels, over each peer's time")
    assert first[1:] == ["s", "32/8", "bf16", "3", "`fa3` 0.50 (0.25–1.00)"]
    assert second[0].endswith("run 2, H200")
    assert second[-1] == "`fa3` 0.25 (0.25)"

"""The generated page of results: the committed one is current, and its ratios are right."""

import json

from benchmarks.results import FOLDER, PAGE, REPRODUCTION, draw_page, with_tables


def test_the_committed_pages_are_current():
    page, text = draw_page(FOLDER), REPRODUCTION.read_text(encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "python -m benchmarks results"
    assert text == with_tables(text, page), "python -m benchmarks results"


def test_a_row_that_failed_and_a_case_of_one_backend_give_no_ratio(tmp_path):
    case = {"host": "sglang", "model": "m", "options": "", "workload": "few-shot", "branches": 32}
    case |= {"prefix": 4096, "ttft_ms": 1.0, "error": None, "detail": {}}
    rows = [{**case, "backend": "deft", "tpot_ms": 4.0}, {**case, "backend": "fa3", "tpot_ms": 10}]
    rows += [{**rows[1], "tpot_ms": 1.0, "error": "lost"}, {**rows[0], "prefix": 100}]
    record = {"header": {"device": "NVIDIA H200"}, "rows": rows}
    (tmp_path / "e2e-x.json").write_text(json.dumps(record), encoding="utf-8")
    (line,) = [line for line in draw_page(tmp_path).splitlines() if "deft / fa3" in line]
    shown = "| [e2e-x](e2e-x.json), H200 | sglang: m | few-shot, 4,096 × 32 | deft / fa3 | 1 | 4.00"
    assert line.startswith(f"{shown}, 10.00 | 0.40 |")

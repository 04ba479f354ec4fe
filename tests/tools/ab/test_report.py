"""The report is self-contained, and every figure on it is in the JSON."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deft_backend.cli.ab_table import acceptance_line
from deft_backend.telemetry.state_reader import Counters
from deft_backend.tools.ab.agreement import Agreement, Divergence
from deft_backend.tools.ab.comparison import AbResult, Compared, Measured
from deft_backend.tools.ab.report import CPU_TIMES, write_report
from deft_backend.tools.ab.units import megabytes, milliseconds, percent

pytest.importorskip("matplotlib")


def measured(kv: float, guided: float, tpot: float | None = 0.0123) -> Measured:
    counters = Counters(40, 37, 5, {"small batch": 3}, int(kv * 40), int(guided * 40))
    return Measured(0.456, tpot, 78.9, 2.5, counters)


def compared(name: str, deft_kv: float, *differs: Divergence) -> Compared:
    agreement = Agreement(8, 8 - len(differs), 0, tuple(differs), 190, 0.00071)
    # The host's server decodes other batches, so the report must not compare its KV reads with
    # ours.
    host, deft = measured(7_000_000.0, 7_000_000.0), measured(deft_kv, 9_876_000.0)
    return Compared(name, f"about {name}", 6, 192, host, deft, agreement)


def result(*workloads: Compared, on_gpu: bool = False) -> AbResult:
    return AbResult(
        workloads=workloads,
        on_gpu=on_gpu,
        model="a/model<b>",
        policy="fasttree",
        commands={"host": "python -m host", "deft": "python -m host --attention-backend deft"},
        backends={"host": "torch_native", "deft": "deft"},
        provenance={
            "date": "2026-01-02T03:04:05+00:00",
            "commit": "abc123",
            "device": "CPU: test",
            "python": "3.11.1",
            "versions": {"torch": "2.11.0"},
        },
    )


class Page(HTMLParser):
    """Text of every table cell, addresses of all loaded parts, and whether tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


DIFFERENCE = Divergence("branch 3", 11, "<cat>", "dog", -0.693, -0.701, 0.002)


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page, _ = write_report(result(compared("few-shot", 2_345_000.0)), tmp_path, "deft ab")
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.sources) == 3
    assert all(s.startswith("data:image/svg+xml;base64,") for s in parsed.sources)
    assert not re.search(r"https?:|url\(|@import|<script", text)
    for source in parsed.sources:
        svg = base64.b64decode(source.partition(",")[2]).decode()
        assert svg.rstrip().endswith("</svg>")
        assert not re.search(r"<image|<script|(?<!xmlns:)xlink:href=\"(?!#)", svg)


def test_every_figure_comes_from_the_json(tmp_path: Path) -> None:
    outcome = result(
        compared("few-shot", 2_345_000.0), compared("unshared", 9_870_000.0, DIFFERENCE)
    )
    page, data = write_report(outcome, tmp_path / "new", "deft ab --quick")
    modes = [path.stat().st_mode & 0o777 for path in (page.parent, page, data)]
    assert modes == [0o700, 0o600, 0o600]  # prompts and answers are in it
    content = json.loads(data.read_text())
    cells = Page(page.read_text()).cells
    assert content["same"] is False
    assert content["command"] == "deft ab --quick"
    assert len(content["workloads"]) == 2
    for record in content["workloads"]:
        expected = [
            record["workload"],
            megabytes(record["kv_bytes_a_step"]["query_by_query"]),
            megabytes(record["kv_bytes_a_step"]["deft"]),
            percent(record["kv_saved"]),
            milliseconds(record["host"]["tpot"]),
            milliseconds(record["deft"]["tpot"]),
            milliseconds(record["host"]["ttft"]),
            milliseconds(record["deft"]["ttft"]),
        ]
        at = cells.index(record["workload"])
        assert cells[at : at + len(expected)] == expected
        counted = record["deft"]["counters"]
        for name, total in (("query_by_query", "kv_bytes_query_guided"), ("deft", "kv_bytes_read")):
            assert record["kv_bytes_a_step"][name] == counted[total] / counted["decode_steps"]
        read = record["kv_bytes_a_step"]
        assert record["kv_saved"] == pytest.approx(1 - read["deft"] / read["query_by_query"])
    assert "76.3 %" in cells
    assert "'<cat>' (-0.693)" in cells
    assert "small batch: 3" in cells


def test_cpu_times_are_disowned_and_gpu_times_are_not(tmp_path: Path) -> None:
    outcome = result(compared("few-shot", 1.0))
    page, _ = write_report(outcome, tmp_path, "deft ab")
    assert CPU_TIMES in page.read_text()
    page, _ = write_report(replace(outcome, on_gpu=True), tmp_path, "deft ab")
    assert CPU_TIMES not in page.read_text()


def test_acceptance_lengths_are_those_of_servers_that_speculate(tmp_path: Path) -> None:
    outcome = result(compared("few-shot", 1.0))
    assert acceptance_line(outcome) is None
    outcome = replace(outcome, acceptance_length={"host": 2.504, "deft": None})
    assert (
        acceptance_line(outcome) == "acceptance length (tokens a verification): host 2.50, deft –"
    )
    page, data = write_report(outcome, tmp_path, "deft ab")
    cells = Page(page.read_text()).cells
    assert cells[cells.index("host acceptance length") + 1] == "2.50"
    assert json.loads(data.read_text())["acceptance_length"] == {"host": 2.504, "deft": None}


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    bare = Measured(0.1, None, 1.0, 1.0, None)
    workload = replace(compared("few-shot", 1.0), host=bare, deft=bare)
    page, data = write_report(result(workload), tmp_path, "deft ab")
    assert json.loads(data.read_text())["workloads"][0]["kv_saved"] is None
    cells = Page(page.read_text()).cells
    assert cells[1:4] == ["–", "–", "–"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 kB"),
        (2.5e6, "2.50 MB"),
        (3e9, "3.00 GB"),
    ],
)
def test_bytes(value: float | None, shown: str) -> None:
    assert megabytes(value) == shown


def test_no_minus_zero() -> None:
    assert percent(-0.0001) == "0.0 %"
    assert percent(-0.012) == "-1.2 %"

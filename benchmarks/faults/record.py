"""The record of the faults: one file for both hosts, and the page's table from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.faults.table import BOTH, FAULTS, Fault
from benchmarks.row_files import RowsError
from deft_backend.files.json_fields import read_json

Row = dict[str, Any]


def read_record(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows, and a header with all runs."""
    content = read_json(path, RowsError, "the record ")
    try:
        return list(content["rows"]), dict(content["header"])
    except (KeyError, TypeError) as error:
        raise RowsError(f"{path} holds no record of faults: {error!r}") from error


def merged(
    path: Path, host: str, rows: list[Row], header: dict[str, Any]
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of this run, and those of earlier runs that it does not repeat.

    Each row names its run by the run's date; the header holds all runs that rows name.
    """
    before, header_before = read_record(path) if path.exists() else ([], {"runs": []})
    repeated = {row["fault"] for row in rows}
    kept = [row for row in before if row["host"] != host or row["fault"] not in repeated]
    all_rows = kept + [{**row, "run": header["date"]} for row in rows]
    named = {row["run"] for row in all_rows}
    runs = [*header_before["runs"], {"host": host, **header}]
    return all_rows, {"runs": [run for run in runs if run["date"] in named]}


BEGIN = "<!-- faults: drawn from results/faults-cpu.json -->\n"
END = "<!-- end of faults -->\n"


def drawn_into(page: str, rows: list[Row]) -> str:
    """The page's text with the table of these rows between its marks.

    Raises
    ------
    RowsError
        If the page lacks a mark.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RowsError(f"the page lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + BEGIN + page_table(rows) + END + after


def page_table(rows: list[Row]) -> str:
    """The table of docs/reliability.md."""
    lines = ["| fault | what the server does | SGLang | vLLM |", "| --- | --- | --- | --- |"]
    for fault in FAULTS:
        cells = [
            _cell(
                [row for row in rows if row["host"] == host and row["fault"] == fault.name],
                fault,
                host,
            )
            for host in BOTH
        ]
        lines.append(f"| {fault.what} | {fault.then} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[Row], fault: Fault, host: str) -> str:
    """What a run found: right answers, and what else there is to say."""
    if host not in fault.hosts:
        return "–"
    if not rows:
        return "not run"
    if not all(row["ok"] for row in rows):
        return "**not as promised**"
    counts = [count for row in rows for count in (row, row.get("after", {}))]
    right = sum(count.get("right", 0) for count in counts)
    ended = [f"ended in {row['ended_after']:.0f} s" for row in rows if "ended_after" in row]
    lost = sum(count.get("lost", 0) + count.get("cut", 0) for count in counts)
    said = [f"{right} right", *([f"{lost} cut off"] if lost else []), *ended]
    return ", ".join(said)

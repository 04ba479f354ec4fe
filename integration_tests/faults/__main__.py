"""``python -m integration_tests.faults``: the record behind docs/reliability.md, and its table.

Injects faults into servers on the CPU and compares every answer with transformers'. Exits with 1 if
an answer is wrong or lost, or a process stays.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.row_files import read_rows, write_rows
from deft_backend.files.provenance import provenance
from integration_tests.faults.run import Harness
from integration_tests.hosts import HOST

FAULTS = json.loads(Path(__file__).with_name("faults.json").read_text())
"""By name: what happens, what the server does then, and the hosts that have the fault."""

BOTH = ["sglang", "vllm"]
BEGIN = "<!-- faults: drawn from results/faults-cpu.json -->\n"
END = "<!-- end of faults -->\n"
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def merged(path, host, rows, header):
    """The rows of this run, and those of earlier runs that it does not repeat.

    Each row names its run by the run's date; the header holds all runs that rows name.
    """
    before, header_before = [], {"runs": []}
    if path.exists():
        before, header_before = read_rows(path, ("fault", "host", "run"), "the faults")
    repeated = {row["fault"] for row in rows}
    kept = [row for row in before if row["host"] != host or row["fault"] not in repeated]
    all_rows = kept + [{**row, "run": header["date"]} for row in rows]
    named = {row["run"] for row in all_rows}
    runs = [*header_before["runs"], {"host": host, **header}]
    return all_rows, {"runs": [run for run in runs if run["date"] in named]}


def drawn_into(page, rows):
    """The page's text with the table of these rows between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the lines {BEGIN.strip()!r} and {END.strip()!r}")
    lines = ["| fault | what the server does | SGLang | vLLM |", "| --- | --- | --- | --- |"]
    for name, fault in FAULTS.items():
        cells = [
            _cell(
                [row for row in rows if row["host"] == host and row["fault"] == name], fault, host
            )
            for host in BOTH
        ]
        lines.append(f"| {fault['what']} | {fault['then']} | {cells[0]} | {cells[1]} |")
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def _cell(rows, fault, host):
    """What a run found: right answers, and what else there is to say."""
    if host not in fault.get("hosts", BOTH):
        return "–"
    if not rows:
        return "not run"
    if not all(row["ok"] for row in rows):
        return "**not as promised**"
    counts = [count for row in rows for count in (row, row.get("after", {}))]
    right = sum(count.get("right", 0) for count in counts)
    ended = [f"ended in {row['ended_after']:.0f} s" for row in rows if "ended_after" in row]
    lost = sum(count.get("lost", 0) + count.get("cut", 0) for count in counts)
    return ", ".join([f"{right} right", *([f"{lost} cut off"] if lost else []), *ended])


def main():
    parser = argparse.ArgumentParser(prog="python -m integration_tests.faults", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="rows of the other host stay")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of triples of faults")
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="only these faults")
    parser.add_argument("--logs", type=Path, help="folder that keeps the servers' logs")
    parser.add_argument("--draw", action="store_true", help="only draw docs/reliability.md")
    asked = parser.parse_args()
    if asked.draw:
        rows, _ = read_rows(asked.out, ("fault", "host", "ok"), "the faults")
        PAGE.write_text(drawn_into(PAGE.read_text(), rows))
        return
    command = shlex.join(["python", "-m", "integration_tests.faults", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.logs or Path(temporary)
        harness = Harness(folder, asked.seed)
        try:
            harness.run(asked.only and set(asked.only))
        finally:
            header = {**provenance(), "command": command, "seed": asked.seed}
            write_rows(asked.out, *merged(asked.out, HOST, harness.rows, header))
    failed = [row for row in harness.rows if not row["ok"]]
    print(f"{len(harness.rows)} faults, {len(failed)} not as promised")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

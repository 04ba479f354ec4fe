"""``python -m integration_tests.zoo``: many architectures, decoded and then checked.

On the CPU, only architectures run that the host's CPU engine can run.
"""

import argparse
import json
import os
import signal
from pathlib import Path

from benchmarks.row_files import write_rows
from deft_backend.files.provenance import provenance
from deft_backend.tools.servers.command import use_gpu, vllm_is_cpu_build
from integration_tests.hosts import HOST
from integration_tests.zoo.run import ARCHITECTURES, Place, end_all, run


def readme_line(rows):
    """The line of the README's table: architectures whose full layers tree attention decodes.

    An architecture counts if every row that checked tokens passed. It stands in the second column
    if the host decodes all of its layers.
    """
    failed = {row["architecture"] for row in rows if row["tokens_wrong"]}
    good = [r for r in rows if r["tokens_checked"] and r["architecture"] not in failed]
    tree = {row["architecture"] for row in good if row["layers_tree"]}
    titles = [
        ", ".join(sorted(ARCHITECTURES[name].title for name in names))
        for names in (tree, {row["architecture"] for row in good} - tree)
    ]
    return f"| architectures checked | {titles[0]} | {titles[1] or '–'} |"


def _key(row):
    names = ("host", "version", "architecture", "kv_dtype", "device")
    options = json.dumps(row.get("options", {}), sort_keys=True)
    return (*(row.get(name) for name in names), options)


def main():
    parser = argparse.ArgumentParser(prog="python -m integration_tests.zoo", description=__doc__)
    parser.add_argument("--only", action="append", choices=ARCHITECTURES, help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("reports/models.json"))
    parser.add_argument("--logs", type=Path, default=Path("reports/zoo"))
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engines, as JSON")
    asked = parser.parse_args()
    gpu = use_gpu() and not (HOST == "vllm" and vllm_is_cpu_build())
    names = asked.only or [name for name, each in ARCHITECTURES.items() if gpu or HOST in each.cpu]

    def stop(number, frame):
        """End the engines and this process; the rows of finished architectures are written."""
        end_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    rows, runs = {}, []
    if asked.out.is_file():
        content = json.loads(asked.out.read_text())
        rows, runs = {_key(row): row for row in content["rows"]}, content["header"]["runs"]
    runs.append(provenance())
    place = Place(HOST, gpu, asked.options)
    for row in run(names, place, asked.logs, asked.at_once, asked.seconds):
        rows[_key(row)] = {**row, "run": len(runs) - 1}
        write_rows(asked.out, list(rows.values()), {"runs": runs})
        print(json.dumps(row), flush=True)
    print(f"The README's line of these rows:\n{readme_line(list(rows.values()))}")


if __name__ == "__main__":
    main()

"""``python -m tests.support.planted_faults --out FILE``: which planted faults do the tests notice?

Each fault of ``planted_faults.json`` replaces a text in a copy of the checkout; the tests that it
names, or those of them that `select` chooses (pytest's ``-k``), then run there. A fault survives if
they pass. Faults that FILE knows as caught are left out; with ``--all`` they are planted again, and
the test that noticed a fault runs first. A fault whose text occurs no more, or more than once, is
``gone``: renew it. Faults of a host run where that host is installed: run the command in both
environments with one FILE. FILE lists its runs, and each row names its own.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_suffix(".json")
PASSED, FAILED, INTERRUPTED = 0, 1, 2  # pytest's exit codes

# Imported once: the process of each fault is a fork. Nothing of this checkout may be among them.
SLOW_IMPORTS = (
    "numba", "torch", "triton.language", "hypothesis", "transformers",
    "sglang.srt.model_executor.forward_batch_info", "sglang.srt.layers.attention.triton_backend",
    "vllm.v1.attention.backend", "vllm.config",
)  # fmt: skip


def copied(folder):
    """A copy of the checkout's files, without recorded runs."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _run(folder, tests, log):
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}:{folder}/patches"
    sys.path[:] = [str(folder), f"{folder}/patches"] + [
        path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "tests")
        and Path(path) not in (ROOT, ROOT / "patches")
    ]  # fmt: skip
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:warnings", *tests]))


def passes(folder, tests, seconds):
    """Pytest's exit code in a copy, and the first failed test."""
    log = folder / "pytest.log"
    run = multiprocessing.get_context("fork").Process(target=_run, args=(folder, tests, log))
    run.start()
    run.join(seconds)
    if run.exitcode is None:
        run.kill()
        return FAILED, f"no end after {seconds:g} s"
    text = log.read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.MULTILINE)
    return run.exitcode, failed[0] if failed else text[-300:] if run.exitcode else ""


def plant(fault, folder, seconds, known=""):
    """One fault's result, and what noticed it; `known` is the test that noticed it before."""
    path = folder / fault["file"]
    text = path.read_text() if path.exists() else ""
    if text.count(fault["old"]) != 1:
        return "gone", f"the text occurs {text.count(fault['old'])} times"
    held = path.stat()
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        selected = ["-k", fault["select"]] if "select" in fault else []
        code = PASSED
        if (folder / known.partition("::")[0]).is_file():
            code, told = passes(folder, [known], seconds)
        if code != FAILED:
            code, told = passes(folder, [*selected, *fault["tests"]], seconds)
    finally:
        path.write_text(text)
        os.utime(path, ns=(held.st_atime_ns, held.st_mtime_ns))  # its compiled file fits again
    if code == PASSED:
        return "survived", ""
    return ("caught" if code in (FAILED, INTERRUPTED) else "no test"), told


def provenance():
    """Of this checkout, read in another process: see ``SLOW_IMPORTS``."""
    script = "from deft_backend.files.provenance import provenance; print(json.dumps(provenance()))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {script}"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    return found


def write(path, header, rows):
    lines = ",\n  ".join(map(json.dumps, rows))
    path.write_text(f'{{"header": {json.dumps(header)},\n "rows": [\n  {lines}\n]}}\n')


def name_of(fault):
    return fault["file"], fault["old"], fault["new"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="faults whose file contains this text")
    parser.add_argument("--all", action="store_true", help="plant caught faults again")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault")
    parser.add_argument("--seconds", type=float, default=300, help="for the tests of a fault")
    given = parser.parse_args()
    faults = json.loads(FAULTS.read_text())
    known = json.loads(given.out.read_text()) if given.out.exists() else {"rows": [], "header": {}}
    rows = {name_of(row): row for row in known["rows"]}
    chosen = [
        fault for fault in faults
        if given.only in fault["file"] and find_spec(fault.get("host", "torch"))
        and (given.all or rows.get(name_of(fault), {}).get("result") != "caught")
    ]  # fmt: skip
    runs = [*known["header"].get("runs", []), provenance()]
    for name in SLOW_IMPORTS:
        if find_spec(name.split(".")[0]):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        copied(Path(place))
        if chosen and not given.trust:
            named = sorted({test for fault in chosen for test in fault["tests"]})
            code, told = passes(Path(place), named, 20 * given.seconds)
            if code != PASSED:
                sys.exit(f"the tests fail without a fault: {told}")
        counts = Counter(row["result"] for row in rows.values())
        for fault in chosen:
            noticed_by = rows.get(name_of(fault), {}).get("noticed_by", "")
            result, told = plant(fault, Path(place), given.seconds, noticed_by)
            row = {**fault, "result": result, "noticed_by": told, "run": len(runs)}
            rows[name_of(fault)] = row
            print(f"{result:9} {fault['file']}: {fault['new'].strip()!r} {told}", flush=True)
            kept = [rows[name_of(fault)] for fault in faults if name_of(fault) in rows]
            counts = Counter(row["result"] for row in kept)
            write(given.out, {"counts": counts, "of": len(faults), "runs": runs}, kept)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 0 if counts.keys() <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())

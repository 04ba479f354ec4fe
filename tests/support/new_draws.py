"""``python -m tests.support.new_draws``: random tests from new seeds, for a given time.

Half of the time goes to the property tests that need no kernel, half to `benchmarks fuzz`.
Each command is printed with its seed before it runs, so that it can be run again.
"""

import argparse
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHEAP = (
    *["tests/forest", "tests/policies", "tests/planner/test_planner.py", "tests/files"],
    *["tests/tools/explain", "tests/tools/traces"],
)


def run(arguments):
    """Print a command and run it; leave with its exit code if it fails."""
    print(f"+ DEFT_RANDOM_TESTS=1 {shlex.join(['python', *arguments])}", flush=True)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "DEFT_RANDOM_TESTS": "1"},
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"new draws failed; the command above draws them again (code {done.returncode})")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    begin = time.monotonic()
    while time.monotonic() - begin < seconds / 2:
        seed = secrets.randbelow(1 << 32)
        run(["-m", "pytest", "-q", "-m", "hypothesis", f"--hypothesis-seed={seed}", *CHEAP])
    with tempfile.TemporaryDirectory() as folder:
        limits = f"--seconds {max(0.1, seconds / 4):g} --seed {secrets.randbelow(1 << 20)}"
        run(["-m", "benchmarks", "fuzz", *limits.split(), "--out", f"{folder}/fuzz.json"])


if __name__ == "__main__":
    main()

"""Commands that get a signal leave no server behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
psutil = pytest.importorskip("psutil")

COMMAND = """
import sys
from pathlib import Path

import typer
from bench_e2e_fakes import fake_launch
from rich.console import Console

from benchmarks.e2e.run import Recorder, Side, record
from benchmarks.e2e.workloads import BATCHES, Job, Sizes, few_shot
from deft_backend.cli.errors import unwound

folder = Path(sys.argv[1])
sides = [Side(fake_launch(), "hangs")]
jobs = [Job("few-shot", few_shot, BATCHES, Sizes(0, 2, 4), 4)]


def main() -> None:
    with unwound(Console(), "no server is left"):
        recorder = Recorder(folder / "rows.json", "", sides, "right")
        record(sides, jobs, recorder, folder / "logs", print, together=False)


sys.argv = ["deft"]
typer.run(main)
"""


def running(process):
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def command(tmp_path):
    """The command while its server starts, and the server's process."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    begin = time.monotonic()
    while not (started := psutil.Process(process.pid).children()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - begin < 120
        time.sleep(0.1)
    time.sleep(0.5)
    yield process, started
    for left in [*started, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [(signal.SIGTERM, 2, 143), (signal.SIGINT, 1, 130), (signal.SIGINT, 3, 130)],
)
def test_a_benchmark_that_is_ended_ends_its_server(command, number, times, code):
    """`timeout` sends SIGTERM twice, to the command and its group; people press Ctrl-C twice."""
    process, started = command
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.05)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert said.splitlines()[-1] == "no server is left"
    assert said.splitlines()[-3:-1] == ["", "interrupted; ending what this command started"]
    assert not [child for child in started if running(child)]


SLOW = """
import signal, sys, time

# A job in the background ignores Ctrl-C, and so would this process.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow:
    def find_spec(self, name, path, target=None):
        if name == module:
            print("importing", flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                if breaks:  # as extensions do
                    raise ImportError("broken off")
                raise

module, breaks = sys.argv[1], sys.argv[2] == "True"
sys.meta_path.insert(0, Slow())
sys.argv = ["deft", "explain", "--tree", "1,4 64,8"]
from deft_backend.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "breaks"),
    [("rich", True), ("deft_backend.cli.app", False), ("deft_backend.tools.explain", False)],
)
def test_ctrl_c_while_a_command_imports(module, breaks):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, module, str(breaks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    # A shell turns the signal into 130 as well.
    assert (process.returncode, said) in ((130, "\ninterrupted\n"), (-signal.SIGINT, ""))

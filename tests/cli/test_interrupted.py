"""Ctrl-C while a command still imports its modules."""

import os
import signal
import subprocess
import sys

import pytest

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

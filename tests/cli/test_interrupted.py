"""Ctrl-C while a command still imports its modules, and signals afterwards."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from commands import run
from deft_backend.cli.errors import FirstSignal, ended_by_signals, unwound
from drawings import terminal

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
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    # A shell turns the signal into 130 as well.
    assert (process.returncode, said) in ((130, "\ninterrupted\n"), (-signal.SIGINT, ""))


@pytest.fixture
def handlers():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs may ignore it
    yield lambda: [signal.getsignal(number) for number in numbers]
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_command_unwinds_at_ctrl_c_unless_the_shell_ignores_it(handlers):
    for before, during in (
        (signal.SIG_DFL, signal.default_int_handler),
        (signal.SIG_IGN, signal.SIG_IGN),
    ):
        signal.signal(signal.SIGINT, before)
        run("explain")
        assert handlers()[0] is during


def test_the_first_signal_cancels_what_runs_and_later_ones_nothing(capfd):
    first = FirstSignal()

    async def waits():
        for number in (signal.SIGTERM, signal.SIGINT):
            first(number, None)
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(waits())
    assert first.number == signal.SIGTERM
    assert capfd.readouterr().err == "\ninterrupted; ending what this command started\n"
    with pytest.raises(KeyboardInterrupt):
        FirstSignal()(signal.SIGINT, None)


def test_a_block_without_a_signal_leaves_the_handlers(handlers):
    before = handlers()
    with unwound(terminal(), "gone") as first:
        assert handlers() == 3 * [first]
    assert handlers() == before
    with pytest.raises(KeyboardInterrupt), unwound(terminal(), "gone"):
        raise KeyboardInterrupt  # of no signal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with unwound(terminal(), "gone") as first, ended_by_signals():
        int_handler, term, hup = handlers()
        assert (int_handler, hup) == (first, signal.SIG_IGN)
        with pytest.raises(SystemExit) as ended:
            term(signal.SIGTERM, None)
    assert ended.value.code == 128 + signal.SIGTERM
    assert handlers() == [*before[:2], signal.SIG_IGN]

"""Host servers as child processes: command lines, waiting, failures and cleanup."""

import os
import signal
import socket
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from deft_backend.tools.servers import command as command_module
from deft_backend.tools.servers import process as process_module
from deft_backend.tools.servers import sessions
from deft_backend.tools.servers.command import ServerCommand, StartError, free_port, server_command
from drawings import check_drawn

SERVER = """
import http.server, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == sys.argv[2] else 404)
        self.end_headers()
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked", flush=True)))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(script, *arguments):
    port = free_port()
    words = (sys.executable, "-c", script, str(port), *arguments)
    return ServerCommand(words, {}, port, on_gpu=False)


def gone(pid):
    """Whether the process has ended (or is a zombie that nobody has waited for)."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_a_free_port_is_none_that_listens_or_that_a_connection_may_get(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        taken = other.getsockname()[1]
        asked = iter((taken, taken, 32_767))
        monkeypatch.setattr(
            "secrets.choice", lambda ports: next(asked) if max(ports) < 32_768 else 0
        )
        assert free_port() == 32_767


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_the_whole_tree_ends_with_the_block(path, tmp_path):
    waited = []
    log = tmp_path / "log"
    with process_module.ServerProcess(command(SERVER, path), log, progress=waited.append) as server:
        leader = server.pid
        child = int(log.read_text().split()[1])
        os.kill(child, 0)
        server.check_alive()
    assert server._guard.returncode == 0
    server.stop()  # once more does no harm
    assert waited
    assert log.read_text().endswith("asked\n")
    assert gone(leader)
    assert gone(child)


STARTER = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from pathlib import Path
import typer
from rich.console import Console
from deft_backend.cli.errors import unwound
from deft_backend.tools.servers.command import ServerCommand
from deft_backend.tools.servers.process import ServerProcess
server = ServerCommand(tuple(sys.argv[2:]), {}, int(sys.argv[5]), on_gpu=False)
log = Path(sys.argv[1])

def main() -> None:
    with unwound(Console(), "no server is left"), ServerProcess(server, log) as started:
        print(started.pid, flush=True)
        time.sleep(600)

sys.argv = ["deft"]
typer.run(main)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (signal.SIGTERM, 2, 143),
        (signal.SIGHUP, 1, 129),
        (signal.SIGINT, 1, 130),
        (signal.SIGINT, 3, 130),
        (signal.SIGKILL, 1, -signal.SIGKILL),
    ],
)
def test_what_ends_its_starter_ends_it(number, times, code, tmp_path):
    """`timeout` sends SIGTERM twice, and people press Ctrl-C twice; nobody can catch SIGKILL."""
    arguments = [str(tmp_path / "log"), *command(SERVER, "/health").arguments]
    starter = [sys.executable, "-c", STARTER, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(starter, **pipes) as process:
        server = int(process.stdout.readline())
        os.kill(server, 0)
        child = int((tmp_path / "log").read_text().split()[1])
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.05)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    if number != signal.SIGKILL:
        interrupted = "interrupted; ending what this command started"
        assert said.splitlines() == ["", interrupted, "no server is left"]
    assert gone(server)
    assert gone(child)


@pytest.mark.timeout(60)
def test_an_interrupt_at_the_wrong_moment_does_not_hang(tmp_path):
    """An interrupted `Popen.poll` may leave its lock taken for good."""
    with process_module.ServerProcess(command(SERVER, "/health"), tmp_path / "log") as server:
        child = int((tmp_path / "log").read_text().split()[1])
        process = server._process
        process._waitpid_lock.acquire()
        server.check_alive()
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert gone(process.pid)
    assert gone(child)


def test_a_server_that_does_not_end_by_itself_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "PATIENCE", 0.5)
    deaf = SERVER.replace('lambda *_: sys.exit(print("asked", flush=True))', "signal.SIG_IGN")
    with process_module.ServerProcess(command(deaf, "/health"), tmp_path / "log") as server:
        leader = server.pid
    assert gone(leader)
    sessions.end_session(leader)  # finds nobody


def test_a_signal_while_it_starts_ends_it(tmp_path, monkeypatch):
    """The signal waits until the new process is known."""
    real, started = subprocess.Popen, []

    def start(*arguments, **options):
        started.append(real(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(process_module.subprocess, "Popen", start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            process_module.ServerProcess(command(SERVER, "/health"), tmp_path / "log").__enter__()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 2
    assert all(gone(process.pid) for process in started)


def test_early_death_shows_the_end_of_the_log(tmp_path):
    script = """import sys; sys.stdout.buffer.write(b"first, and no UTF-8: \\xff\\n")
[print("line", n) for n in range(40)]; raise SystemExit(3)"""
    log = tmp_path / "folder" / "log"
    with pytest.raises(StartError) as error:
        process_module.ServerProcess(command(script), log).__enter__()
    said = str(error.value)
    assert "exit code 3" in said
    assert str(log) in said
    assert "line 39" in said
    assert "first" not in said


def test_the_commands_of_servers_are_as_drawn(monkeypatch):
    """On a GPU, and on a machine without one and without its driver."""
    monkeypatch.setattr(command_module, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(command_module, "ensure_driver_stub", lambda: "/stub")
    monkeypatch.setitem(command_module.BACKEND_NAMES, "vllm", "CUSTOM")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    given = {"environment": {"DEFT_POLICY": "fasttree"}, "host_arguments": ["--seed", "9"]}
    lines = []
    for host, gpu in product(("sglang", "vllm"), (True, False)):
        found = server_command("M", 1234, host=host, gpu=gpu, **given)
        lines += [found.shell().replace(sys.executable, "python"), *found.notes]
    for backend in ("fa3", None):
        lines.append(server_command("M", 1234, backend=backend, gpu=True).shell().split("M ")[1])
    for words in (
        "--port=31201 --host ::1",
        "--host=0.0.0.0",
        "--host ::",
        "--host 10.1.2.3 --host",
    ):
        found = server_command("M", 1234, host="vllm", host_arguments=words.split(), gpu=True)
        lines += [f"{words}: {found.url}"]
    for gpu, words in ((True, "--api-server-count=4"), (False, "-asc 4")):
        of = server_command("M", 1, host="vllm", host_arguments=words.split(), gpu=gpu)
        lines += [of.shell().replace(sys.executable, "python"), *of.notes]
    check_drawn("\n".join(lines) + "\n", Path(__file__).with_name("commands.txt"))

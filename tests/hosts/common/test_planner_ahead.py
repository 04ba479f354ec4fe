"""A process compiles the host planner ahead; a server that waits for it loads the code."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from deft_backend.files.folders import planner_lock
from deft_backend.files.locks import locked
from deft_backend.hosts.common import planner_ahead, warm_up

SERVER = """
import json, sys, torch
from numba.core.dispatcher import Dispatcher
from deft_backend.attention import LatentAttention, plain_latent_attention
from deft_backend.hosts.common import warm_up

warm_up.PATIENCE = 100.0  # on a machine that runs much else
warm_up.warm_up_host_planner(LatentAttention(
    num_query_heads=16, dtype=torch.bfloat16, device="cpu", kernel=plain_latent_attention,
    page_size=64,
))
functions = {
    value for name, module in list(sys.modules.items()) if name.startswith("deft_backend")
    for value in vars(module).values() if isinstance(value, Dispatcher)
}
print(json.dumps([
    sum(sum(getattr(each.stats, kind).values()) for each in functions)
    for kind in ("cache_hits", "cache_misses")
]))
"""


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DEFT_POLICY", raising=False)


def started():
    """Start the process; the thread that waits for it, or None if it could not start."""
    before = set(threading.enumerate())
    planner_ahead.start()
    return next(iter(set(threading.enumerate()) - before), None)


def is_held():
    with locked(planner_lock(), 0.0) as free:
        return not free


def test_a_server_loads_what_one_of_two_processes_compiled(capfd):
    first = started()
    until = time.monotonic() + 60
    while not is_held():
        assert time.monotonic() < until
        time.sleep(0.01)
    second = started()
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    second.join(120)
    assert not second.is_alive()
    assert first.is_alive()
    hits, misses = json.loads(server.communicate()[0])
    assert (hits > 10, misses) == (True, 0)
    first.join(120)
    assert not first.is_alive()
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_silent(monkeypatch, tmp_path, capfd):
    (tmp_path / "cache").touch()
    failing = started()
    failing.join(120)
    assert not failing.is_alive()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert started() is None
    assert capfd.readouterr() == ("", "")


def test_a_server_does_not_wait_for_a_process_that_has_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(warm_up, "PATIENCE", 0.1)
    compiled = []
    monkeypatch.setattr(warm_up, "compile_host_planner", compiled.append)
    warm_up.warm_up_host_planner("no folder")
    (tmp_path / "cache").mkdir()
    with locked(planner_lock(), 0.0):
        began = time.monotonic()
        warm_up.warm_up_host_planner("held")
    assert 0.1 <= time.monotonic() - began < 5
    assert compiled == ["no folder", "held"]


def test_the_process_ends_in_any_case():
    code = (
        "from deft_backend.hosts.common import planner_ahead; planner_ahead.LIFETIME = 1; "
        "planner_ahead._compile()"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment)
    assert done.returncode == -signal.SIGALRM

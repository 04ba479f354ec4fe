"""A server's counters and its state file."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from counted_steps import host_step, tree_step
from deft_backend.compile.clock import COMPILING
from deft_backend.files.private_files import write_private
from deft_backend.telemetry import state_reader
from deft_backend.telemetry.counters import Content, Counters, Decoded, DeviceCounters, Place, Steps
from deft_backend.telemetry.shown_batch import answer_file, request_file
from deft_backend.telemetry.state import RETRY_SECONDS, StateWriter
from deft_backend.telemetry.state_reader import BatchQuestion, StateError, read_state, server_file
from failure_lines import raising
from sglang_fakes import make_state
from state_files import state_path

TOKEN = 2 * 2 * 64 * 4  # of make_state: keys and values, KV heads, elements, bytes
LAYERS = 2


@pytest.fixture
def writer(tmp_path):
    return StateWriter(make_state(), tmp_path)


def test_the_writer_does_not_keep_its_process_alive(writer, monkeypatch):
    before, at_exit = set(threading.enumerate()), []
    monkeypatch.setattr("atexit.register", at_exit.append)
    writer.start()
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon, at_exit) == ("deft-state", True, [writer.look])


MOST = (1 << 31) - 1
LIMITS = dict.fromkeys(("pid", "rank", "short_tokens"), (0, MOST)) | {"port": (0, 65_535)}
LIMITS |= dict.fromkeys(("num_layers", "num_query_heads", "num_kv_heads"), (1, MOST))
LIMITS |= dict.fromkeys(("head_dim", "dtype_bytes"), (1, MOST))


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_of_a_state_files_fields(name, writer):
    writer.look()
    content, (least, most) = json.loads(writer.path.read_text()), LIMITS[name]
    assert read_state(writer.path).description() == writer.state.description()
    for value in (least, most):
        write_private(writer.path, json.dumps({**content, name: value}))
        assert getattr(read_state(writer.path), name) == value
    for value in (least - 1, most + 1):
        write_private(writer.path, json.dumps({**content, name: value}))
        with pytest.raises(StateError, match=f"{name} is .* a whole number from {least} to {most}"):
            read_state(writer.path)


def test_a_folder_of_another_user_is_said_once(writer, caplog, monkeypatch):
    """Even the check for a question is refused there."""
    refused, heard = raising(PermissionError(13, "Permission denied")), []
    writer.listeners.append(heard.append)
    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr("deft_backend.telemetry.state.write_private", refused)
    writer.look()
    host_step(writer.state, "x", 1)
    writer.look()
    assert "cannot write the server's state file" in caplog.text
    assert caplog.text.count("Permission denied") == len(caplog.records) == 1
    assert [counters.decode_steps for counters in heard] == [0, 1]  # metrics and log continue


def test_after_a_full_disk_the_file_is_written_again(writer, caplog, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("deft_backend.telemetry.state.time.monotonic", lambda: now[0])
    with monkeypatch.context() as full:
        no_space = raising(OSError(28, "No space left on device"))
        full.setattr("deft_backend.telemetry.state.write_private", no_space)
        for _ in range(3):
            writer.look()
            now[0] += RETRY_SECONDS
    assert caplog.text.count("No space left") == 1
    now[0] -= RETRY_SECONDS / 2
    writer.look()
    assert not writer.path.exists()
    now[0] += RETRY_SECONDS
    writer.look()
    assert writer.path.exists()
    host_step(writer.state, "x", 1)
    writer.look()
    assert caplog.text.count("can be written again") == 1


def test_a_listener_that_raises_is_said_once_and_the_others_go_on(writer, caplog):
    heard = []
    writer.listeners += [
        raising(OSError("disk full")),
        lambda counters: heard.append(counters.decode_steps),
    ]
    for _ in range(3):
        host_step(writer.state, "x", 1)
        writer.look()
    assert heard == [1, 2, 3]
    assert json.loads(writer.path.read_text())["decode_steps"] == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "OSError('disk full')" in caplog.text


def test_steps_and_their_plans_are_one_set_of_figures(writer, monkeypatch):
    state = writer.state
    memory = np.array([7, 700, 70, 7_000_000], dtype=np.int64)  # warm-up
    state.on_device.attach(memory)
    state.count(Decoded("decode", 1, 10), "small")
    for _ in range(3):
        state.count(Decoded("mixed", 4, 100, verified=9))
    writer.look()
    text, before = writer.path.read_text(), state.counters()
    writer.look()
    assert writer.path.read_text() == text  # no change: not written, not even the time
    writer.path.unlink()
    writer.look()
    assert writer.path.exists()
    assert (before.steps_tree, before.decode_steps, before.verified_tokens) == (3, 4, 27)
    assert before.kv_bytes_read == 10 * LAYERS * TOKEN

    memory += [3, 300, 120, 6_000_000]  # like kernels: in place, without a notice
    writer.look()
    content = json.loads(writer.path.read_text())
    assert (content["schema"], content["steps_tree"], content["decode_steps"]) == (4, 3, 4)
    assert [list(steps.values()) for steps in content["steps"]] == [
        ["decode", "small", 1, 1, 10 * LAYERS * TOKEN],
        ["mixed", None, 3, 12, 300 * LAYERS * TOKEN],
    ]
    assert content["kv_bytes_query_guided"] == (10 + 300) * LAYERS * TOKEN
    assert content["kv_bytes_read"] == (10 + 120) * LAYERS * TOKEN
    assert content["plans"] == 3
    assert content["plan_seconds"] == pytest.approx(6e-3)
    assert state.counters().tree_share == 300 / 310

    state.device_tree_layers = 1  # the other layer reads every attended token
    assert state.counters().kv_bytes_read == (10 * LAYERS + 120 + 300) * TOKEN
    assert state.counters().kv_bytes_query_guided == content["kv_bytes_query_guided"]

    state.count_failure(Decoded("mixed", 4, 100, verified=9), "kernel failed")
    counted = state.counters()
    assert (counted.decode_steps, counted.verified_tokens) == (4, 18)
    assert counted.steps_host == {"small": 1, "kernel failed": 1}
    assert counted.total("mixed") == Steps(3, 12, 300 * LAYERS * TOKEN)

    monkeypatch.setattr(COMPILING, "seconds", 9.5)
    state.serving = False
    assert state.counters() == Counters(compile_seconds=9.5)
    state.begin_serving()
    host_step(state, "small", tokens=0)
    served = {Content("decode", "small"): Steps(1, 1, 0)}
    assert state.counters() == Counters(served, compile_seconds=9.5)


def test_readings_while_another_thread_counts(writer):
    """No reading raises or decreases, and the last reading is complete."""
    readings = []
    writer.listeners.append(readings.append)

    def count():
        for i in range(3000):
            host_step(writer.state, f"reason {i}", tokens=1)

    thread = threading.Thread(target=count)
    thread.start()
    while thread.is_alive():
        writer.look()
    thread.join()
    writer.look()
    assert len(writer.listeners) == 1
    steps = [reading.decode_steps for reading in readings]
    assert steps == sorted(steps)
    assert steps[-1] == 3000
    content = json.loads(writer.path.read_text())
    assert len(content["steps_host"]) == 3000
    assert content["kv_bytes_read"] == 3000 * LAYERS * TOKEN


def test_counters_come_back_from_json_and_subtract():
    state = make_state()
    host_step(state, "small", tokens=10)
    state.count(Decoded("verification", 2, 8, verified=5))
    before = Counters.from_json(json.loads(json.dumps(state.counters().as_json())))
    assert before == state.counters()
    tree_step(state, tokens=6, loaded=4)
    host_step(state, "other", tokens=2)
    state.count(Decoded("verification", 3, 8, verified=7))
    token = LAYERS * TOKEN
    assert state.counters() - before == Counters(
        {
            Content("decode", None): Steps(1, 1, 6 * token),
            Content("decode", "other"): Steps(1, 1, 2 * token),
            Content("verification", None): Steps(1, 3, 8 * token),
        },
        plans=1,
        kv_bytes_read=(4 + 2) * token,
        kv_bytes_query_guided=(6 + 2) * token,
        verified_tokens=7,
    )


def test_device_counters_are_four_words_and_go_on_in_another_array():
    counters = DeviceCounters()
    for wrong in (np.zeros(3, np.int64), np.zeros(4, np.int32)):
        with pytest.raises(ValueError, match="expected \\(4,\\) int64"):
            counters.attach(wrong)
    one, two = np.arange(4, dtype=np.int64), np.full(4, 9, np.int64)
    counters.attach(one)
    one += 2
    counters.attach(two)
    two += 1
    assert counters.read() == (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        (["gone", 1, 2, 2], 2),
        (["gone", "gone", "gone", "gone"], "gone"),
        ([1, 2, 3, 4], "the counters still change 0.2 s"),
        ([1, 2, 3, 3], 3),  # the last reading after the time limit counts
    ],
)
def test_counters_of_a_server_at_rest(readings, found, monkeypatch):
    clock, left = [0.0], iter(readings)

    def sleep(seconds):
        clock[0] += 0.0625

    def read(path):
        reading = next(left)
        if reading == "gone":
            raise StateError("gone")
        return SimpleNamespace(counters=reading)

    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0])
    monkeypatch.setattr(state_reader, "time", fake)
    monkeypatch.setattr(state_reader, "read_state", read)
    if isinstance(found, int):
        assert state_reader.settled_counters(Path("x"), 0.2) == found
    else:
        with pytest.raises(StateError, match=found.replace("0.2", "0")):
            state_reader.settled_counters(Path("x"), 0.2)
    assert next(left, None) is None


@pytest.mark.parametrize(
    ("name", "machine"), [("node-1.x_y", "node-1.x_y"), ("a b/ü", "a_b__"), ("", "_")]
)
def test_a_place_is_the_machines_name_and_the_processes_namespace(name, machine, monkeypatch):
    here = Place.here.__func__.__wrapped__
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert here(Place) == (machine, os.stat("/proc/self/ns/pid").st_ino)
    monkeypatch.setattr("socket.gethostname", lambda: 70 * "n")
    monkeypatch.setattr("os.stat", raising(OSError))
    assert here(Place) == (64 * "n", 0)


def test_the_file_of_the_one_server_that_runs(tmp_path):
    def refused(said, port=None):
        with pytest.raises(StateError, match=said):
            server_file(tmp_path, port)

    refused("no server with the plugin is running, according to")
    refused("there is no state file of a server on port 8 in", 8)
    ended, elsewhere = 2**22 + 1, Place("x", 1)
    state_path(tmp_path, 8, pid=ended).touch()
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but nobody has asked
    state_path(tmp_path, 9, pid=child.pid).touch()
    refused("no server with the plugin is running")
    assert server_file(tmp_path, 8) == state_path(tmp_path, 8, pid=ended)
    (tmp_path / "notes.json").touch()
    running = [state_path(tmp_path, 70, **rank) for rank in ({}, {"tp": 1}, {"dp": 1})]
    for path in running:
        path.touch()
    assert server_file(tmp_path) == running[0]  # of its first rank
    state_path(tmp_path, 8, place=elsewhere).touch()
    refused("2 servers with the plugin are running, .* Name its port: --server 8 or 70")
    assert server_file(tmp_path, 8) == state_path(tmp_path, 8, place=elsewhere)  # it may run
    assert child.wait() == 0


def test_a_server_that_shows_no_batch(tmp_path, monkeypatch):
    path = state_path(tmp_path)
    monkeypatch.setattr(state_reader, "ANSWER_SECONDS", 0.0)
    with pytest.raises(StateError, match="did not say within 0 s which batch"):
        state_reader.shown_forest(path)
    assert not request_file(path).exists()
    question = BatchQuestion(path)
    assert question.answer() is None
    for answer, said in (
        ({"error": "it prefills"}, "the server has no batch to show: it prefills"),
        ({"forest": []}, "cannot ask the server for its last batch: forest"),
        ([], "cannot ask the server for its last batch"),
    ):
        write_private(answer_file(path), json.dumps(answer))
        with pytest.raises(StateError, match=said):
            question.answer()
    question.withdraw()
    question.withdraw()
    assert not request_file(path).exists()
    with pytest.raises(StateError, match="cannot ask the server for its last batch"):
        BatchQuestion(tmp_path / "missing" / path.name)

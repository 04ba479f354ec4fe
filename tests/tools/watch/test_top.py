"""`deft top`: every server's state file, and what the terminal shows of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commands import run
from counted_steps import host_step, tree_step
from deft_backend.forest import build_forest
from deft_backend.telemetry.counters import Content, Counters, Place, Steps
from deft_backend.telemetry.shown_batch import Batch, answer_file, request_file
from deft_backend.telemetry.state import KEPT_SECONDS, StateWriter
from deft_backend.telemetry.state_reader import StateReading, running_here, server_file
from deft_backend.tools.watch import engines
from deft_backend.tools.watch.figures import view
from drawings import check_drawn, terminal
from sglang_fakes import make_state
from state_files import batch_of, state_path

WRITTEN = 1_800_000_000.0

FOREST = build_forest([2, 0, 1], [60, 40], [100, 90, 80])


@pytest.fixture
def tmp_path(tmp_path):
    """The folder of servers' state, in a cache folder."""
    return tmp_path / "servers"


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch):
    """Only a writer that runs answers the question for its batch."""
    monkeypatch.setattr("deft_backend.cli.views._FIRST_ANSWER", 0.0)


def decoding(folder, port=7, **fields):
    state = make_state()
    vars(state).update(port=port, batch=batch_of(FOREST), **fields)
    tree_step(state, FOREST.tokens_attended, FOREST.tokens_stored)
    writer = StateWriter(state, folder)
    writer.look()
    return state, writer


def shown(folder, *arguments):
    return run("top", *arguments, COLUMNS="80", DEFT_CACHE_DIR=str(folder.parent))[:2]


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def status(path, later=0.0):
    """Of the server, so many seconds after its file was written."""
    (engine,) = engines.find_engines(path.parent, now=WRITTEN + later)
    return engine.status


def test_the_states_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: WRITTEN)
    _, writer = decoding(tmp_path)
    os.utime(writer.path, (0, WRITTEN))
    assert status(writer.path) == engines.DECODING
    assert [status(writer.path, later=later) for later in (4.9, 5, 15)] == [
        engines.DECODING,
        engines.IDLE,
        engines.IDLE,
    ]
    assert (
        status(writer.path, later=15.1) == engines.SILENT
    )  # its writer would have touched the file
    os.utime(writer.path, (0, WRITTEN + 100))
    assert status(writer.path, later=100) == engines.IDLE

    writer.path.write_text("{")
    assert status(writer.path) == engines.UNREADABLE
    writer.path.unlink()

    _, ended = decoding(tmp_path, pid=dead_pid())
    os.utime(ended.path, (0, WRITTEN))
    assert status(ended.path) == engines.ENDED
    # Elsewhere, its process id means nothing here: the file's age tells.
    container = state_path(tmp_path, port=7, pid=1, place=Place("another-node", 7))
    ended.path.rename(container)
    assert status(container) == engines.DECODING
    monkeypatch.setattr(time, "time", lambda: WRITTEN + 100)
    assert status(container, later=100) == engines.ENDED


def test_servers_of_one_port_and_one_home_are_told_apart(tmp_path):
    """Two containers have a home in common: each server has its file, and each line its place."""
    _, own = decoding(tmp_path)
    state, other = decoding(tmp_path)
    host_step(state, "small", 10)
    other.path = state_path(tmp_path, port=7, place=Place("another-node", 7))
    other.look()
    own.look()
    here, there = engines.find_engines(tmp_path)
    assert (here.name, there.name) == ("7", "7 on another-node")
    assert [engine.counters.decode_steps for engine in (here, there)] == [1, 2]
    assert "7 on another-node decoding" in shown(tmp_path, "--once")[1]
    assert running_here(tmp_path, 7) == server_file(tmp_path, 7) == own.path


def test_a_writer_deletes_what_earlier_servers_of_its_port_left(tmp_path):
    decoding(tmp_path, pid=dead_pid())
    _, running = decoding(tmp_path, pid=os.getppid())
    _, elsewhere = decoding(tmp_path)
    elsewhere.path = elsewhere.path.rename(state_path(tmp_path, 7, place=Place("x", 1)))
    _, forgotten = decoding(tmp_path, port=5, pid=os.getppid())
    os.utime(forgotten.path, (0, time.time() - KEPT_SECONDS - 60))
    answer_file(forgotten.path).touch()
    request_file(forgotten.path).touch()
    _, remembered = decoding(tmp_path, port=10, pid=os.getppid())
    os.utime(remembered.path, (0, time.time() - KEPT_SECONDS + 60))
    (tmp_path / "notes.json").write_text("{}")
    state = make_state()
    state.port = 7
    writer = StateWriter(state, tmp_path)
    writer.start()
    kept = {each.path.name for each in (writer, running, elsewhere, remembered)} | {"notes.json"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_ranks_add_their_bytes_but_not_their_steps(tmp_path):
    decoding(tmp_path)
    decoding(tmp_path, rank=1)
    decoding(tmp_path, port=8)
    first, second = engines.find_engines(tmp_path)
    assert (first.port, first.processes, second.processes) == (7, 2, 1)
    assert first.counters.decode_steps == second.counters.decode_steps == 1
    assert first.counters.kv_bytes_read == 2 * second.counters.kv_bytes_read


def decoded(steps):
    return Counters({Content("decode", None): Steps(steps)})


def test_the_rate_is_of_the_last_seconds_and_starts_again_with_another_server():
    rate = engines.Rate()
    assert rate.add(0.0, 1, decoded(10)) is None
    for second in range(1, 21):
        now = rate.add(float(second), 1, decoded(10 + second * second))
    assert now.counters.decode_steps == 20 * 20 - 15 * 15
    assert now.steps_a_second == (20 * 20 - 15 * 15) / 5
    assert rate.add(21.0, 1, decoded(3)) is None
    assert rate.add(22.0, 2, decoded(30)) is None
    assert rate.add(23.0, 2, decoded(34)) is not None
    assert rate.add(24.0, 2, decoded(32)) is None  # one that restarted and has decoded more
    assert rate.add(200.0, 2, decoded(90)) is None  # minutes ago is not now
    later = rate.add(201.0, 2, decoded(93))
    assert (later.counters.decode_steps, later.seconds) == (3, 1.0)


def test_an_ended_server_shows_when_it_ended_and_no_rate(tmp_path):
    """The file's last sign of life counts, not the last change of a counter."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    state, writer = decoding(tmp_path, pid=process.pid)
    follower = engines.Follower(seconds=0.0)
    (engine,) = engines.find_engines(tmp_path)
    follower.look(engine)
    process.kill()
    process.wait()
    tree_step(state, FOREST.tokens_attended, FOREST.tokens_stored)
    writer.look()
    content = json.loads(writer.path.read_text())
    writer.path.write_text(json.dumps({**content, "updated": time.time() - 88}))
    os.utime(writer.path, (0, time.time() - 10))
    (engine,) = engines.find_engines(tmp_path)
    assert engine.status == engines.ENDED
    assert engine.since == pytest.approx(10, abs=3)
    assert follower.look(engine).now is None
    assert "7: ended 1" in shown(tmp_path, "--once")[1]


def test_a_question_without_an_answer_is_asked_again(tmp_path, monkeypatch):
    """After 20 s, if the server has decoded since; a waiting look takes its time."""
    now = [100.0]
    fake = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(engines, "time", fake)
    state, writer = decoding(tmp_path)
    question, follower, asked = request_file(writer.path), engines.Follower(seconds=2.0), []

    def look(at, wait=0.0):
        now[0] = at
        (engine,) = engines.find_engines(tmp_path, now=time.time())
        follower.look(engine, wait)
        asked.append(question.exists())
        question.unlink(missing_ok=True)

    look(100.0, wait=0.2)
    assert now[0] == pytest.approx(100.25)
    for at in (119.9, 120.0, 139.9, 140.0):
        tree_step(state, 1, 1)
        writer._write(state.counters())
        look(at)
    look(200.0)  # no step since
    assert asked == [True, False, True, False, True, False]
    follower.close()
    assert not question.exists()


def test_a_server_with_the_device_planner_is_asked(tmp_path):
    state, writer = decoding(tmp_path)
    state.batch = Batch(torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5]]), torch.tensor([3, 4]), 1)
    tree_step(state, 7, 5)
    writer.look()
    (engine,) = engines.find_engines(tmp_path)
    batches = engines.Follower(seconds=0.0)
    assert batches.look(engine).batch == "the server has not shown its batch yet"
    writer.look()
    found = batches.look(engine).batch
    assert (found.batch_size, found.tokens_stored) == (2, 5)
    state.batch = "its layers differ"
    tree_step(state, 7, 5)
    writer.look()
    (engine,) = engines.find_engines(tmp_path)
    batches.look(engine)
    writer.look()
    assert "its layers differ" in batches.look(engine).batch
    batches.close()


DRAWN = build_forest(range(6), [900, 600, 300, 200, 100], [2000] * 6)
REASONS = {"shares nothing": 9, "batch too small": 1, "third": 4, "fourth": 3, "fifth": 2}
BUSY = Counters(
    {
        Content("decode", None): Steps(2_000, 9_000, 600),
        Content("mixed", None): Steps(30, 90, 300),
        **{Content("decode", reason): Steps(n, n, n) for reason, n in REASONS.items()},
    },
    plans=2_030,
    kv_bytes_read=990_000_000,
    kv_bytes_query_guided=1_000_000_000_000,
    plan_seconds=0.5,
    verified_tokens=1,
    compile_seconds=0.1,
)
FEW = Counters(
    {Content("verification", None): Steps(1, 1, 1)},
    plans=1,
    kv_bytes_read=995,
    kv_bytes_query_guided=1000,
    plan_seconds=0.01,
    compile_seconds=0.09,
)
HOST_ONLY = Counters(
    {Content("decode", "off"): Steps(1, 1, 1)}, kv_bytes_read=1_000, kv_bytes_query_guided=999
)
NO_BATCH = "no batch has gone through tree attention yet"


def row(port, status, since, counters=FEW, batch=NO_BATCH, now=None, dp=None, processes=1, **more):
    place = more.pop("place", Place.here())
    described = {**make_state().description(), "pid": 4711, "host_version": "0.5.23"}
    described |= {"device": "NVIDIA H100", "policy": "auto", **more}
    times = {"updated": 0.0, "sign_of_life": 0.0}
    read = StateReading(**described, counters=counters, **times)
    reading = None if status == engines.UNREADABLE else read
    problem = "" if reading else "it holds a list; expected an object"
    engine = engines.Engine(
        port, place, dp, Path("x"), status, since, reading, counters, processes, problem
    )
    return engines.Row(engine, batch, now)


def drawn(rows, **given):
    console = terminal()
    console.print(view(rows, "/cache/servers", **given))
    return console.file.getvalue()


def test_the_views_are_as_drawn(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda shape: {"%H:%M:%S": "12:34:56"}[shape])
    other = {"host": "vllm", "host_version": "0.33.0", "short_tokens": 512}
    rows = [
        row(1, engines.DECODING, 1.0, BUSY, DRAWN, engines.Stretch(FEW, 0.5), dp=0, processes=2),
        row(2, engines.IDLE, 119.6, place=Place("another-node", 7), **other),
        row(3, engines.IDLE, 120.0, HOST_ONLY, now=engines.Stretch(Counters(), 1.0)),
        row(4, engines.SILENT, 7200.0, Counters(), build_forest([0, 1], [4], [5, 6])),
        row(5, engines.UNREADABLE, 0.0),
        row(6, engines.ENDED, 172_800.0),
    ]
    every = [
        drawn(rows, live=True),
        drawn([], live=False),
        drawn(rows[-1:], live=False, port=6),
        drawn(rows[1:2], live=False, port=2),
    ]
    check_drawn("\n".join(every), Path(__file__).with_name("top.ansi"))

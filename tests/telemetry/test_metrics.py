"""The server's counters as Prometheus metrics, and the line in its log."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_fakes
from counted_steps import host_step, tree_step
from deft_backend.compile.clock import COMPILING
from deft_backend.hosts.sglang.report import start_reporting
from deft_backend.settings.config import Settings
from deft_backend.telemetry import decode_log, metrics
from deft_backend.telemetry.counters import Content, Counters, Place, Steps
from deft_backend.telemetry.state import StateWriter
from deft_backend.telemetry.state_reader import SILENT_SECONDS
from drawings import check_drawn
from state_files import state_path

client = pytest.importorskip("prometheus_client")
multiprocess = pytest.importorskip("prometheus_client.multiprocess")


def steps(tree=0, **host):
    """Counts of steps: decode through tree attention, and by reason through the host's kernel."""
    counted = {None: tree, **host}
    return {Content("decode", why): Steps(n, 2 * n, 9 * n) for why, n in counted.items() if n}


READINGS = (
    Counters(steps(2, small=1), 1, 100, 400, 0.5, compile_seconds=9.5),
    Counters(steps(2, small=1), 1, 100, 400, 0.5, compile_seconds=9.5),
    Counters(
        {**steps(5, small=3), Content("mixed", "shares nothing"): Steps(1, 4, 8)},
        *(2, 250, 1000, 0.75, 21, 9.5),
    ),
)
PUBLISH = """
import json, os, sys
import deft_backend.telemetry.metrics as metrics, deft_backend.hosts.sglang.factory
import deft_backend.hosts.sglang.plugin
assert "prometheus_client" not in sys.modules, "imported before the host can have set its mode"
mode, folder, ranks, readings = sys.argv[1:]
if mode == "late":  # imported by the process that this one was forked from
    import prometheus_client
os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
if mode == "beside":  # the host has counters of its own in the process
    from prometheus_client import Counter
    Counter("theirs", "of the host").inc(3)
from deft_backend.telemetry.counters import Content, Counters, Place, Steps
publish = metrics.publisher(json.loads(ranks))
for reading in json.loads(readings):
    publish(Counters.from_json(reading))
again = metrics.publisher(json.loads(ranks))  # a second source in the process adds up
again(Counters({Content("decode", None): Steps(1, 2, 9)}))
if mode == "beside":
    from prometheus_client import Counter
    Counter("later", "of the host").inc(4)
"""


def page(registry):
    return sorted(client.generate_latest(registry).decode().splitlines())


def check_page(lines, name):
    check_drawn("\n".join(lines) + "\n", Path(__file__).with_name(name))


def run_publishing(mode, folder, ranks, readings):
    content = [reading.as_json() for reading in readings]
    subprocess.run(
        [sys.executable, "-c", PUBLISH, mode, str(folder), json.dumps(ranks), json.dumps(content)],
        check=True,
        cwd=Path(__file__).parents[2],
    )


def test_processes_of_one_server_publish_into_its_page(tmp_path):
    """The host's page covers the files of all processes, whenever they imported the client."""
    run_publishing("beside", tmp_path, {"tp_rank": "0"}, READINGS)
    run_publishing("late", tmp_path, {"tp_rank": "1"}, READINGS[:1])
    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    check_page(page(registry), "published.txt")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("variable", "PROMETHEUS_MULTIPROC_DIR is not set"),
        ("client", "prometheus_client is not installed"),
        ("folder", "FileNotFoundError"),
    ],
)
def test_what_cannot_be_published_costs_one_line(what, said, monkeypatch, caplog, tmp_path):
    metrics._value_class.cache_clear()
    metrics._value.cache_clear()
    if what == "variable":
        monkeypatch.delenv(metrics.MULTIPROCESS, raising=False)
    else:
        monkeypatch.setenv(metrics.MULTIPROCESS, str(tmp_path / "missing"))
    if what == "client":
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert metrics.publisher({"tp_rank": "0"}) is None
    assert len(caplog.records) == 1
    assert said in caplog.text


def write(folder, rank, **changes):
    """The state file of a rank of the server on port 1, after `rank + 1` tree steps."""
    state = sglang_fakes.make_state()
    state.rank = rank
    for _ in range(rank + 1):
        tree_step(state, tokens=10, loaded=4)
    host_step(state, "small", tokens=5)
    state.pid = changes.pop("pid", state.pid)
    writer = StateWriter(state, folder)
    writer.look()
    if changes:
        content = json.loads(writer.path.read_text())
        writer.path.write_text(json.dumps(content | changes))
    return writer


def test_an_api_server_shows_the_counters_of_its_engines(tmp_path, monkeypatch):
    """Files of other ports, of dead processes and without a process are ignored."""
    monkeypatch.setattr(COMPILING, "seconds", 9.5)
    registry = client.CollectorRegistry()
    metrics.register_states(tmp_path / "states", 1, registry)
    assert b"deft_" not in client.generate_latest(registry)  # a server without this option
    writer = write(tmp_path / "states", 0)
    write(tmp_path / "states", 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write(tmp_path / "states", 2, pid=ended.pid)
    earlier = write(tmp_path / "states", 3)  # another program has the process id by now
    os.utime(earlier.path, (0, time.time() - SILENT_SECONDS - 1))
    write(tmp_path / "states", 4, schema=1)
    write(tmp_path / "states", 5, steps=None)
    state_path(tmp_path / "states", tp=6).write_text("{")
    state_path(tmp_path / "states", port=11).write_text(writer.path.read_text())
    # A server in another container has the same port, process id and home.
    elsewhere = state_path(tmp_path / "states", tp=7, place=Place("container", 7))
    elsewhere.write_text(writer.path.read_text())

    lines = page(registry)
    tree_step(writer.state, tokens=10, loaded=4)
    writer.look()
    changed = ["changed:", *(line for line in page(registry) if line not in lines)]
    check_page([*lines, *changed], "page.txt")


def test_nothing_is_registered_where_the_page_is_made_from_files(monkeypatch, tmp_path):
    """Every process would show the values that the decoding process has published."""
    monkeypatch.setenv(metrics.MULTIPROCESS, str(tmp_path))
    registry = client.CollectorRegistry()
    write(tmp_path, 0)
    metrics.register_states(tmp_path, 1, registry)
    assert page(registry) == []


def test_a_line_every_so_many_steps(caplog):
    caplog.set_level(logging.INFO, "deft_backend")
    log = decode_log.DecodeLog(steps=4)
    for tree, host in ((0, 0), (3, 0), (3, 1), (3, 1), (6, 1), (9, 3)):
        log(Counters(steps(tree, small=host)))
    said = "deft: {} decode steps through tree attention, {} decode on the host's kernel (small); "
    said += "tree attention did 75 % of the decoding"
    assert caplog.messages == [said.format(3, 1), said.format(6, 2)]


def test_a_line_every_so_many_seconds(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "deft_backend")
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(decode_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = decode_log.DecodeLog(seconds=10)
    for now, tree in ((1009, 3), (1010, 4), (1019, 5), (1020, 6)):
        clock.now = now
        log(Counters(steps(tree)))
    assert [line.split(" through")[0] for line in caplog.messages] == [
        "deft: 4 decode steps",
        "deft: 2 decode steps",
    ]


def test_what_the_line_says():
    whole = Counters(
        {
            Content("decode", None): Steps(4100, 9000, 960),
            Content("decode", "batch smaller than DEFT_MIN_BATCH=2"): Steps(10, 10, 20),
            Content("mixed", None): Steps(20, 80, 10),
            Content("mixed", "shares nothing"): Steps(2, 8, 10),
        },
        200,
        41_200_000_000,
        310_500_000_000,
        0.0804,
    )
    assert decode_log.describe(whole) == (
        "4,100 decode and 20 mixed steps through tree attention, 10 decode and 2 mixed on the "
        "host's kernel (10 × batch smaller than DEFT_MIN_BATCH=2, 2 × shares nothing); tree "
        "attention did 97 % of the decoding; KV read 41.2 GB of 310.5 GB query by query (13 %); "
        "planning 0.4 ms a plan"
    )
    slow = [decode_log.time_of_a_plan(Counters(plans=2, plan_seconds=s)) for s in (0.0192, 3.0)]
    assert slow == ["9.6 ms", "1,500 ms"]
    # A reading may fall between the counts of a plan and of its time.
    between = Counters(steps(1), 0, 50, 100, 0.002)
    assert decode_log.describe(between) == (
        "1 decode step through tree attention; KV read 50 B of 100 B query by query (50 %)"
    )


@pytest.mark.parametrize(
    ("enabled", "rank", "level", "listening"),
    [
        (True, 0, "info", [metrics.Publisher, decode_log.DecodeLog]),
        (True, 1, "info", [metrics.Publisher]),  # the host logs on the first rank only
        (True, 0, "quiet", [metrics.Publisher]),
        (False, 0, "debug", [decode_log.DecodeLog]),
        (False, 0, "quiet", []),
    ],
)
def test_what_sglang_is_told(enabled, rank, level, listening, monkeypatch, tmp_path):
    metrics._value_class.cache_clear()
    metrics._value.cache_clear()
    monkeypatch.setenv(metrics.MULTIPROCESS, str(tmp_path))
    started = []
    monkeypatch.setattr(StateWriter, "start", lambda writer: started.append(writer))
    runner, state = sglang_fakes.model_runner(), sglang_fakes.make_state()
    vars(runner.server_args).update(enable_metrics=enabled, pp_size=2, dp_size=2)
    runner.ps = SimpleNamespace(tp_rank=rank, attn_tp_rank=rank, pp_rank=0, dp_rank=1)
    state.rank = rank
    start_reporting(state, runner, Settings(cache_dir=tmp_path, log=level))
    (writer,) = started
    assert [type(listener) for listener in writer.listeners] == listening
    assert writer.path == state_path(tmp_path / "servers", tp=rank, pp=0, dp=1)

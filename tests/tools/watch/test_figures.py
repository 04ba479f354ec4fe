"""What `deft top` draws: every line, width and style, as a terminal of 80 columns gets it."""

import time
from pathlib import Path

from deft_backend.forest import build_forest
from deft_backend.telemetry.counters import Content, Counters, Place, Steps
from deft_backend.telemetry.state_reader import StateReading
from deft_backend.tools.watch.engines import (
    DECODING,
    ENDED,
    IDLE,
    SILENT,
    UNREADABLE,
    Engine,
    Row,
    ShownBatch,
    Stretch,
)
from deft_backend.tools.watch.figures import view
from drawings import check_drawn, terminal

FOREST = build_forest(range(6), [900, 600, 300, 200, 100], [2000] * 6)
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
NO_BATCH = ShownBatch(problem="no batch has gone through tree attention yet")


def row(port, status, since, counters=FEW, batch=NO_BATCH, now=None, dp=None, processes=1, **more):
    place = more.pop("place", Place.here())
    usual = {"host": "sglang", "host_version": "0.5.23", "chunk_tokens": 0}
    reading = None
    if status != UNREADABLE:
        reading = StateReading(
            pid=4711,
            port=port,
            rank=0,
            backend="deft",
            policy="auto",
            device="NVIDIA H100",
            dtype="bfloat16",
            num_layers=2,
            num_query_heads=8,
            num_kv_heads=2,
            head_dim=64,
            dtype_bytes=2,
            path=Path("x"),
            counters=counters,
            updated=0.0,
            sign_of_life=0.0,
            **{**usual, **more},
        )
    problem = "" if reading else "it holds a list; expected an object"
    engine = Engine(
        port, place, dp, Path("x"), status, since, reading, counters, processes, problem
    )
    return Row(engine, batch, now)


def drawn(rows, **given):
    console = terminal()
    console.print(view(rows, "/cache/servers", **given))
    return console.file.getvalue()


def test_the_views_are_as_drawn(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda shape: {"%H:%M:%S": "12:34:56"}[shape])
    other = {"host": "vllm", "host_version": "0.33.0", "chunk_tokens": 256}
    rows = [
        row(1, DECODING, 1.0, BUSY, ShownBatch(FOREST), Stretch(FEW, 0.5), dp=0, processes=2),
        row(2, IDLE, 119.6, place=Place("another-node", 7), **other),
        row(3, IDLE, 120.0, HOST_ONLY, now=Stretch(Counters(), 1.0)),
        row(4, SILENT, 7200.0, Counters(), ShownBatch(build_forest([0, 1], [4], [5, 6]))),
        row(5, UNREADABLE, 0.0),
        row(6, ENDED, 172_800.0),
    ]
    every = [
        drawn(rows, live=True),
        drawn([], live=False),
        drawn(rows[-1:], live=False, port=6),
        drawn(rows[1:2], live=False, port=2),
    ]
    check_drawn("\n".join(every), Path(__file__).with_name("top.ansi"))

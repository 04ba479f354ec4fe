"""What the server says about its decoding, on ``/metrics`` and in its log, is what it counted."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from sglang_server import Ask, Server

PREFIX = (
    "At the end of the pier a lamp was lit each night, and whoever kept it wrote down the ships "
    "that passed, their flags, their lights, and the weather they came out of. "
)
LINE = re.compile(
    r"deft: (?:([\d,]+) decode steps? through tree attention)?(?:, )?"
    r"(?:([\d,]+)(?: decode steps?)? through the host's kernel \(.+?\))?; KV read "
)


def expected(state: dict[str, Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The series that a state file stands for."""
    host = state["steps_host"]
    values: list[tuple[str, dict[str, str], float]] = [
        ("deft_decode_steps_total", {"kernel": "tree"}, state["steps_tree"]),
        ("deft_decode_steps_total", {"kernel": "host"}, sum(host.values())),
        *(("deft_host_decode_steps_total", {"reason": r}, n) for r, n in host.items()),
        ("deft_kv_read_bytes_total", {}, state["kv_bytes_read"]),
        ("deft_kv_query_guided_bytes_total", {}, state["kv_bytes_query_guided"]),
        ("deft_plans_total", {}, state["plans"]),
        ("deft_plan_seconds_total", {}, state["plan_seconds"]),
    ]
    return {(name, frozenset((labels | {"tp_rank": "0"}).items())): n for name, labels, n in values}


def logged_steps(log: str) -> tuple[int, int]:
    """Steps through tree attention and through the host's kernel, of all lines."""
    tree = host = 0
    for line in LINE.finditer(log):
        tree += int((line[1] or "0").replace(",", ""))
        host += int((line[2] or "0").replace(",", ""))
    return tree, host


@pytest.mark.parametrize("server", ["no-overlap"], indirect=True)
def test_metrics_and_log_say_what_was_counted(server: Server) -> None:
    """Group no-overlap: --enable-metrics --decode-log-interval 4."""
    server.complete([Ask(PREFIX + f"Of ship {i} it says", tokens=12) for i in range(5)])
    server.complete([Ask("A single line.", tokens=6)])  # the host's kernel, with a reason

    deadline = time.monotonic() + 60  # until the writer has caught up, however slow the machine
    while True:
        state = server.state()
        figures = server.metrics("deft_")
        if figures == pytest.approx(expected(state)) or time.monotonic() > deadline:
            break
    assert figures == pytest.approx(expected(state))
    assert state["steps_tree"] > 0
    assert state["steps_host"]
    assert state["plans"] > 0
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]

    tree, host = logged_steps(server.log)
    assert 0 < tree <= state["steps_tree"]
    assert host <= sum(state["steps_host"].values())
    assert 0 <= state["decode_steps"] - tree - host < 4  # the rest waits for the next line
    # The host's own metrics are on the same page, unharmed.
    assert server.metrics("sglang:")
    assert not server.trouble()

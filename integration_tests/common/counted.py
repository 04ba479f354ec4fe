"""Compare a server's ``/metrics`` and log with its state file."""

import re
import time

import pytest

LINE = re.compile(
    r"deft: (?:([\d,]+) decode steps? through tree attention)?(?:, )?"
    r"(?:([\d,]+)(?: decode steps?)? on the host's kernel \(.+?\))?"
    r"(?:; [\d,]+ tokens verified)?(?:; acceptance length [\d.]+)?; KV read "
)


def expected_series(state):
    """The series that correspond to a state file."""
    host = state["steps_host"]
    values = [
        ("deft_decode_steps_total", {"kernel": "tree"}, state["steps_tree"]),
        ("deft_decode_steps_total", {"kernel": "host"}, sum(host.values())),
        *(("deft_host_decode_steps_total", {"reason": r}, n) for r, n in host.items()),
        ("deft_kv_read_bytes_total", {}, state["kv_bytes_read"]),
        ("deft_kv_query_guided_bytes_total", {}, state["kv_bytes_query_guided"]),
        ("deft_plans_total", {}, state["plans"]),
        ("deft_plan_seconds_total", {}, state["plan_seconds"]),
        ("deft_verified_tokens_total", {}, state["verified_tokens"]),
        ("deft_verified_drafts_total", {}, state["verified_drafts"]),
        ("deft_accepted_tokens_total", {}, state["accepted_tokens"]),
        ("deft_compile_seconds_total", {}, state["compile_seconds"]),
        ("deft_short_extends_total", {}, state["short_extends"]),
    ]
    return {(name, frozenset((labels | {"tp_rank": "0"}).items())): n for name, labels, n in values}


def check_metrics(server):
    """Check that an idle server's page shows its state file; returns the file's content."""
    deadline = time.monotonic() + 60  # until the writer has caught up, even on a slow machine
    while True:
        state = server.state()
        figures = server.metrics("deft_")
        if figures == pytest.approx(expected_series(state)) or time.monotonic() > deadline:
            break
    assert figures == pytest.approx(expected_series(state))
    return state


def logged_steps(log):
    """Steps through tree attention and through the host's kernel, of all lines."""
    tree = host = 0
    for line in LINE.finditer(log):
        tree += int((line[1] or "0").replace(",", ""))
        host += int((line[2] or "0").replace(",", ""))
    return tree, host

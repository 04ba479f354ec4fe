"""Compare a server's ``/metrics`` and log with its state file."""

import re
import time
from collections import Counter

import pytest


def check_metrics(server):
    """Check that an idle server's page shows its state file; returns the file's content.

    Series are summed over kinds and reasons of steps.
    """
    deadline = time.monotonic() + 60  # until the writer has caught up, even on a slow machine
    while True:
        state, figures = server.state(), Counter(host_decode_steps=0)  # no series without any
        for (name, _), value in server.metrics("deft_").items():
            figures[name.removeprefix("deft_").removesuffix("_total")] += value
        same = ("plans", "plan_seconds", "verified_tokens", "compile_seconds", "decode_steps")
        expected = {name: state[name] for name in same}
        expected |= {
            f"kv_{name}_bytes": state[f"kv_bytes_{name}"] for name in ("read", "query_guided")
        }
        expected["host_decode_steps"] = sum(state["steps_host"].values())
        expected["decode_rows"] = sum(row["rows"] for row in state["steps"])
        expected["decode_context_bytes"] = sum(row["kv_bytes"] for row in state["steps"])
        if figures == pytest.approx(expected) or time.monotonic() > deadline:
            break
    assert figures == pytest.approx(expected)
    return state


def logged_steps(log):
    """Steps through tree attention and through the host's kernel, of all lines."""
    tree = host = 0
    for steps in re.findall(r"deft: (\d[^;(]*).*; KV read ", log):
        ours, _, hosts = steps.rpartition("through tree attention")
        tree, host = tree + number_of(ours), host + number_of(hosts)
    return tree, host


def number_of(words):
    """The sum of the numbers in a part of a line, such as "1,200 decode and 3 mixed"."""
    return sum(int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", words))

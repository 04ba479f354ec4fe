"""Compare a server's ``/metrics`` and log with its state file."""

import re
import time
from itertools import product
from operator import add

import pytest

LINE = re.compile(
    r"deft: (?:(?P<tree>[^;(]*?) steps? through tree attention)?(?:, )?"
    r"(?:(?P<host>[^;(]*?)(?: steps?)? on the host's kernel \(.+?\))?"
    r"(?:; tree attention did \d+ % of the decoding)?"
    r"(?:; [\d,]+ tokens verified)?; KV read "
)


def expected_series(state):
    """The series that correspond to a state file."""
    totals = dict.fromkeys(
        product(("decode", "mixed", "verification"), ("tree", "host")), (0, 0, 0)
    )
    for row in state["steps"]:
        content = row["kind"], "tree" if row["reason"] is None else "host"
        numbers = (row[name] for name in ("steps", "rows", "kv_bytes"))
        totals[content] = tuple(map(add, totals[content], numbers))
    values = [
        *(
            (f"deft_decode_{name}_total", {"kind": kind, "kernel": kernel}, numbers[at])
            for (kind, kernel), numbers in totals.items()
            for at, name in enumerate(("steps", "rows", "context_bytes"))
        ),
        *(
            (
                "deft_host_decode_steps_total",
                {"kind": row["kind"], "reason": row["reason"]},
                row["steps"],
            )
            for row in state["steps"]
            if row["reason"] is not None
        ),
        ("deft_kv_read_bytes_total", {}, state["kv_bytes_read"]),
        ("deft_kv_query_guided_bytes_total", {}, state["kv_bytes_query_guided"]),
        ("deft_plans_total", {}, state["plans"]),
        ("deft_plan_seconds_total", {}, state["plan_seconds"]),
        ("deft_verified_tokens_total", {}, state["verified_tokens"]),
        ("deft_compile_seconds_total", {}, state["compile_seconds"]),
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
    found = [(number_of(line["tree"]), number_of(line["host"])) for line in LINE.finditer(log)]
    return sum(tree for tree, _ in found), sum(host for _, host in found)


def number_of(words):
    """The sum of the numbers in a part of a line, such as "1,200 decode and 3 mixed"."""
    return sum(int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", words or ""))

"""The server's ``/metrics`` and log show the values that it counted."""

from integration_tests.common.answers import on
from integration_tests.common.counted import check_metrics, logged_steps
from integration_tests.sglang_server import Ask

PREFIX = (
    "At the end of the pier a lamp was lit each night, and whoever kept it wrote down the ships "
    "that passed, their flags, their lights, and the weather they came out of. "
)


@on("no-overlap")
def test_metrics_and_log_say_what_was_counted(server):
    """Group no-overlap: --enable-metrics --decode-log-interval 4."""
    # One request with several choices: on few cores, several requests may each decode alone.
    server.complete([Ask(PREFIX + "Of ships it says", tokens=12, n=5)])
    server.complete([Ask("A single line.", tokens=6)])  # the host's kernel, with a reason

    state = check_metrics(server)
    assert state["steps_tree"] > 0
    assert state["steps_host"]
    assert state["plans"] > 0
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]

    tree, host = logged_steps(server.log)
    assert 0 < tree <= state["steps_tree"]
    assert host <= sum(state["steps_host"].values())
    assert 0 <= state["decode_steps"] - tree - host < 4  # the other steps wait for the next line
    # The host's own metrics are on the same page, unchanged.
    assert server.metrics("sglang:")
    assert not server.trouble()

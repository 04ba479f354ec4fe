"""vLLM's own ``/metrics`` and the log show the values that the server counted."""

from concurrent.futures import ThreadPoolExecutor

from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.common.counted import check_metrics, logged_steps
from integration_tests.vllm.vllm_server import Ask, together


@on("default")
def test_metrics_and_log_say_what_was_counted(server):
    """Group default: VLLM_LOG_STATS_INTERVAL is a second."""
    asks = [Ask(PREFIX + f"Of {topic} they wrote", tokens=24) for topic in TOPICS[:4]]
    server.complete([together(asks)])
    server.complete([Ask("A single line.", tokens=4)])  # below DEFT_MIN_BATCH
    state = check_metrics(server)
    assert state["steps_tree"] > 0
    assert state["steps_host"]
    assert state["plans"] == state["steps_tree"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    # A line covers whole steps, and steps after the last line are not logged yet.
    tree, host = logged_steps(server.log)
    assert 0 < tree <= state["steps_tree"]
    assert host <= sum(state["steps_host"].values())
    assert server.metrics("vllm:")  # the host's own, on the same page
    assert not server.trouble()


@on("default")
def test_explain_shows_what_decodes_at_once(server):
    """Ask while they decode, because the last step may hold one request only."""
    asks = [Ask(PREFIX + f"On {topic} one reads", tokens=48) for topic in TOPICS[:4]]
    shown = []
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.complete, [together(asks)])
        while not answers.done():
            if server.state()["steps_tree"]:
                shown.append(server.explain()["batch_size"])
    assert len(answers.result()[0]) == len(asks)
    assert shown
    assert 2 <= max(shown) <= len(asks)
    assert not server.trouble()


def test_another_backend_is_left_alone(baseline):
    baseline.complete([Ask("A short line about snow.", tokens=4)] * 2)
    assert baseline.is_left_alone()

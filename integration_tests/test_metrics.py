"""The server's ``/metrics``, its log and `deft explain` show the values that it counted."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.common.counted import check_metrics, logged_steps
from integration_tests.common.server import Ask, together
from integration_tests.hosts import HOST


@on(sglang=("no-overlap",), vllm=("default",))
def test_metrics_and_log_say_what_was_counted(server):
    """SGLang's group logs every 4 steps, vLLM's every second."""
    asks = [Ask(PREFIX + f"Of {topic} they wrote", tokens=16) for topic in TOPICS[:4]]
    server.complete([together(asks)])
    server.complete([Ask("A single line.", tokens=6)])  # the host's kernel, with a reason
    state = check_metrics(server)
    assert state["steps_tree"] > 0
    assert state["steps_host"]
    assert state["plans"] == state["steps_tree"]
    assert 0 < state["kv_bytes_read"] < state["kv_bytes_query_guided"]
    # A line covers whole steps, and steps after the last line are not logged yet.
    tree, host = logged_steps(server.log)
    assert 0 < tree <= state["steps_tree"]
    assert host <= sum(state["steps_host"].values())
    assert HOST == "vllm" or 0 <= state["decode_steps"] - tree - host < 4
    assert server.metrics(f"{HOST}:")  # the host's own, on the same page
    assert not server.trouble()


@on("default")
def test_explain_and_top_show_what_decodes_at_once(server):
    """Ask while they decode, because the last step may hold one request only. No view shows a word
    of the prompts."""
    asks = [Ask(PREFIX + f"On {topic} one reads", tokens=64) for topic in TOPICS[:4]]
    port, shown, panels = str(server.process.command.port), [], []
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.complete, [together(asks)])
        while not answers.done():
            if server.state()["steps_tree"]:
                shown.append(server.deft("explain", "--json", "--server", port))
                panels.append(server.deft("top", "--once"))
    assert len(answers.result()[0]) == len(asks)
    assert any(2 <= json.loads(found)["batch_size"] <= len(asks) for found in shown)
    assert any(re.search(rf"{port} (decoding|idle)", panel) for panel in panels)
    assert max(len(line) for panel in panels for line in panel.splitlines()) <= 80
    assert "library" not in "".join(shown + panels)
    assert not server.trouble()

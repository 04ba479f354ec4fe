"""Sum the decode steps through tree attention over all servers of a test run."""

import json
from contextlib import contextmanager


class StepTotal:
    """The sum so far, and the servers' device."""

    tree_steps = 0
    device = "cpu"


@contextmanager
def counted(server, state_dir):
    """A server for a `with` block; its steps are added when the block ends."""
    try:
        yield server
    finally:
        path = state_dir / f"{server.process.command.port}-tp0.json"
        if path.is_file():
            state = json.loads(path.read_text())
            StepTotal.tree_steps += state["steps_tree"]
            StepTotal.device = state["device"]

"""Sum the decode steps through tree attention over all servers of a test run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from integration_tests.common.server import Server


class StepTotal:
    """The sum so far, and the servers' device."""

    tree_steps = 0
    device = "cpu"


@contextmanager
def counted(server: Server, state_dir: Path) -> Iterator[Server]:
    """A server for a `with` block; its steps are added when the block ends."""
    try:
        yield server
    finally:
        path = state_dir / f"{server.process.command.port}-tp0.json"
        if path.is_file():
            state = json.loads(path.read_text())
            StepTotal.tree_steps += state["steps_tree"]
            StepTotal.device = state["device"]

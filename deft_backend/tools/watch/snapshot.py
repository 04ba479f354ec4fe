"""What the page of `deft inspect` shows, as plain data: one engine, its counters and its batch."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.tools.watch.batches import Follower
from deft_backend.tools.watch.engines import Engine, find_engines

_ASK_SECONDS = 2.0
"""Seconds between two questions for the batch of a server with the device planner."""


class Inspector:
    """Looks at the server on one port, for any number of threads.

    - `folder`: the folder of the state files.
    - `port`: the server's.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._lock = threading.Lock()
        self._engines: dict[Path, _Followed] = {}

    def state(self, engine: int = 0, known: int = -1) -> dict[str, Any]:
        """The data of one engine.

        - `engine`: which of the server's engines, if it has several.
        - `known`: the serial number of the batch that the asker has; that batch is not sent again.
        """
        with self._lock:
            present = find_engines(self._folder, self._port)
            names = [each.name for each in present]
            base: dict[str, Any] = {"port": self._port, "engines": names}
            if not present:
                return {**base, "status": "missing", "since": 0.0, "batch": None}
            chosen = present[min(max(engine, 0), len(names) - 1)]
            followed = self._engines.setdefault(chosen.path, _Followed())
            return {**base, **followed.state(chosen, known)}

    def close(self) -> None:
        with self._lock:
            for followed in self._engines.values():
                followed.close()


class _Followed(Follower):
    """One engine with its last batch."""

    def __init__(self) -> None:
        super().__init__(_ASK_SECONDS)
        self._serial = 0
        self._batch: dict[str, Any] | None = None

    def state(self, engine: Engine, known: int) -> dict[str, Any]:
        row, reading = self.look(engine), engine.reading
        content: dict[str, Any] = {
            "status": engine.status, "since": engine.since, "problem": engine.problem,
            "processes": engine.processes, "batch": None,
        }  # fmt: skip
        if reading is None:
            return content
        names = ("pid", "host", "host_version", "backend", "policy", "device", "num_layers")
        content["server"] = {name: getattr(reading, name) for name in names}
        content["counters"] = engine.counters.as_json()
        content["saved"] = engine.counters.saved
        content["now"] = row.now and {
            "steps_a_second": row.now.steps_a_second, "saved": row.now.counters.saved,
        }  # fmt: skip
        if row.batch.forest is None:
            self._batch = None
            content["problem"] = row.batch.problem
            return content
        batch = batch_json(row.batch.forest, row.batch.rids)
        if batch != self._batch:
            self._batch = batch
            self._serial += 1
        news = {} if known == self._serial else batch
        content["batch"] = {"serial": self._serial, **news}
        return content


def batch_json(forest: PrefixForest, rids: Sequence[str]) -> dict[str, Any]:
    """A forest, with the host's names of its requests if they are known."""
    named = len(rids) == forest.batch_size
    columns = (
        forest.parent, forest.start, forest.length, forest.query_begin, forest.query_end,
    )  # fmt: skip
    return {
        "requests": [
            {"name": str(rids[at]) if named else f"#{at}", "tokens": tokens}
            for at, tokens in enumerate(forest.seq_lens.tolist())
        ],
        "order": forest.order.tolist(),
        "nodes": np.stack(columns, axis=1).tolist() if forest.num_nodes else [],
        "share": forest.share,
        "stored": forest.tokens_stored,
        "attended": forest.tokens_attended,
    }

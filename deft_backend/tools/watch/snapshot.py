"""What the page of `deft inspect` shows, as plain data: one engine, its counters and its batch."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.planner import plan_grouping
from deft_backend.policies import POLICY_NAMES, get_policy
from deft_backend.telemetry.state_reader import StateReading
from deft_backend.tools.explain.structure import describe_items
from deft_backend.tools.watch.batches import Follower
from deft_backend.tools.watch.engines import Engine, find_engines
from deft_backend.tools.watch.server_target import server_target

_ASK_SECONDS = 2.0
"""Seconds between two questions for the batch of a server with the device planner."""

_KEEP_SECONDS = 0.2  # several tabs that ask within this time get one reading


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
        self._read_at = float("-inf")
        self._present: list[Engine] = []

    def state(self, engine: int = 0, known: int = -1) -> dict[str, Any]:
        """The data of one engine.

        - `engine`: which of the server's engines, if it has several.
        - `known`: the serial number of the batch that the asker has; that batch is not sent again.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._read_at > _KEEP_SECONDS:
                self._present, self._read_at = find_engines(self._folder, self._port), now
            names = [each.name for each in self._present]
            base: dict[str, Any] = {"port": self._port, "engines": names}
            if not self._present:
                return {**base, "status": "missing", "since": 0.0, "batch": None}
            chosen = self._present[min(max(engine, 0), len(names) - 1)]
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
        self._digest: bytes | None = None
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
        shown = row.batch
        if shown.forest is None:
            self._batch = self._digest = None
            content["problem"] = shown.problem
            return content
        try:
            self._describe(shown.forest, shown.rids, reading)
        except Exception as error:  # the page shows it; the counters are still true
            self._batch = self._digest = None
            content["problem"] = f"this batch cannot be explained: {error!r}"
            return content
        assert self._batch is not None
        content["batch"] = {"serial": self._serial} if known == self._serial else self._batch
        return content

    def _describe(self, forest: PrefixForest, rids: Sequence[str], reading: StateReading) -> None:
        arrays = (forest.order, forest.seq_lens, forest.parent, forest.start, forest.length)
        digest = b"|".join([*(a.tobytes() for a in arrays), "\0".join(rids).encode()])
        if digest == self._digest:
            return
        self._serial += 1
        self._batch = {"serial": self._serial, **batch_json(forest, rids, reading)}
        self._digest = digest


def batch_json(forest: PrefixForest, rids: Sequence[str], reading: StateReading) -> dict[str, Any]:
    """A forest, its plan's work items and what both mean for a step.

    The plan is made here, by the server's policy and for its device. Device plans can differ in
    where they cut long ranges.
    """
    policy = reading.policy if reading.policy in POLICY_NAMES else "auto"
    target = server_target(reading, forest.page_size)
    plan = plan_grouping(get_policy(policy).group(forest, target), forest, target)
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
        "items": [vars(item) for item in describe_items(forest, plan)],
        "share": forest.share,
        "stored": forest.tokens_stored,
        "attended": forest.tokens_attended,
        "loaded": plan.loaded_tokens(forest.seq_lens),
    }  # fmt: skip

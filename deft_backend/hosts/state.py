"""What a running server tells other processes: counters and its last forest, in a JSON file."""

from __future__ import annotations

import atexit
import json
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deft_backend.forest import PrefixForest

logger = logging.getLogger(__name__)

SCHEMA = 1
INTERVAL = 0.25
"""Seconds between two looks for something new to write."""

_FOREST_ARRAYS = (
    "order", "parent", "row", "start", "length", "query_begin", "query_end", "leaf", "seq_lens",
)  # fmt: skip


@dataclass
class ServerState:
    """Counters of one server process. The forward thread adds, the writer thread reads.

    Attributes
    ----------
    dtype_bytes : int
        Bytes of one element of the KV cache.
    steps_tree : int
        Decode steps through tree attention.
    steps_host : Counter
        Decode steps through the host's own kernel, by reason.
    kv_bytes_read : int
        Bytes of KV that decode attention read.
    kv_bytes_query_guided : int
        What reading every request's whole KV would have read for the same steps.
    """

    port: int
    rank: int
    host: str
    host_version: str
    backend: str
    policy: str
    device: str
    dtype: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    pid: int = field(default_factory=os.getpid)
    steps_tree: int = 0
    steps_host: Counter[str] = field(default_factory=Counter)
    kv_bytes_read: int = 0
    kv_bytes_query_guided: int = 0
    plans: int = 0
    plan_seconds: float = 0.0
    forest: PrefixForest | None = None
    rids: Sequence[str] = ()

    @property
    def decode_steps(self) -> int:
        return self.steps_tree + self.steps_host.total()

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def count_host(self, reason: str, tokens: int) -> None:
        """Count a step of the host's kernel over `tokens` tokens of context, of all requests."""
        self.steps_host[reason] += 1
        read = tokens * self.token_bytes * self.num_layers
        self.kv_bytes_read += read
        self.kv_bytes_query_guided += read

    def count_tree(self, tokens: int, loaded: int, tree_layers: int) -> None:
        """Count a step of tree attention.

        Parameters
        ----------
        tokens : int
            Tokens of context, summed over requests.
        loaded : int
            Tokens that the plan's items load.
        tree_layers : int
            Layers that went through the plan; the others read query by query.
        """
        self.steps_tree += 1
        others = self.num_layers - tree_layers
        self.kv_bytes_read += (loaded * tree_layers + tokens * others) * self.token_bytes
        self.kv_bytes_query_guided += tokens * self.num_layers * self.token_bytes

    def as_json(self) -> dict[str, Any]:
        """The file's content, less the time of writing."""
        forest = self.forest
        return {
            "schema": SCHEMA,
            "pid": self.pid,
            "port": self.port,
            "rank": self.rank,
            "host": self.host,
            "host_version": self.host_version,
            "backend": self.backend,
            "policy": self.policy,
            "device": self.device,
            "dtype": self.dtype,
            "num_layers": self.num_layers,
            "num_query_heads": self.num_query_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype_bytes": self.dtype_bytes,
            "steps_tree": self.steps_tree,
            "steps_host": dict(self.steps_host),
            "kv_bytes_read": self.kv_bytes_read,
            "kv_bytes_query_guided": self.kv_bytes_query_guided,
            "decode_steps": self.decode_steps,
            "plans": self.plans,
            "plan_seconds": self.plan_seconds,
            "forest": None
            if forest is None
            else {
                **{name: getattr(forest, name).tolist() for name in _FOREST_ARRAYS},
                "page_size": forest.page_size,
                "rids": list(self.rids),
            },
        }


class StateWriter:
    """Writes a :class:`ServerState` to its file, from a daemon thread and at exit.

    A file that cannot be written is said once in the log; the server goes on without it.
    """

    def __init__(self, state: ServerState, directory: Path, suffix: str = "") -> None:
        self.state = state
        self.path = directory / f"{state.port}-tp{state.rank}{suffix}.json"
        self._seen: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._failed = False

    def start(self) -> None:
        """Write once, then go on in the background."""
        self.write()
        threading.Thread(target=self._run, name="deft-state", daemon=True).start()
        atexit.register(self.write)

    def write(self) -> None:
        """Write the file if something changed since the last time."""
        with self._lock:
            version = (self.state.decode_steps, self.state.plans)
            if self._failed or version == self._seen:
                return
            try:
                self._replace({**self.state.as_json(), "updated": time.time()})
            except RuntimeError:  # a counter was added meanwhile: the next look gets it
                return
            except OSError as error:
                self._failed = True
                logger.warning("deft: the server's state is not written: %s", error)
                return
            self._seen = version

    def _replace(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    def _run(self) -> None:
        while not self._failed:
            time.sleep(INTERVAL)
            self.write()

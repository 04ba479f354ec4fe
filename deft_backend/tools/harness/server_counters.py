"""The plugin's counters of a server: from its state file, or from its /metrics."""

import re
import time
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.metrics import FIGURES, HOST_STEPS, STEPS
from deft_backend.telemetry.state_reader import (
    StateError,
    StateReading,
    read_state,
    running_servers,
    settled_counters,
)
from deft_backend.tools.servers.get_page import get_page

_SERIES = re.compile(r"(deft_\w+_total)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServerCounters:
    """Reads the counters of the server at a URL, if it shows any.

    - `url`: the server.
    - `folder`: State files of servers on this machine.
    - `wait_seconds`: how long to wait for a state file: a server writes it a moment after its first
      decode step.
    """

    def __init__(self, url: str, folder: Path, wait_seconds: float = 1.0) -> None:
        self._wait_seconds = wait_seconds
        parts = urlsplit(url)
        self._url = url
        self._port = parts.port or 80
        self._folder = folder
        self._local = parts.hostname in ("127.0.0.1", "localhost", "::1")

    def state(self) -> StateReading | None:
        """What the server says about itself; None without a state file."""
        path = self._file()
        if path is None:
            return None
        try:
            return read_state(path)
        except StateError:
            return None

    def read(self) -> Counters | None:
        """The counters, once a server without other traffic has come to rest."""
        path = self._file()
        if path is None:
            page = get_page(f"{self._url}/metrics")
            return None if page is None else counters_of_page(page)
        try:
            return settled_counters(path, timeout=5.0)
        except StateError:  # other clients use the server
            state = self.state()
            return None if state is None else state.counters

    def _file(self) -> Path | None:
        end = time.monotonic() + self._wait_seconds
        while self._local:
            path = running_servers(self._folder).get(self._port)
            if path is not None:
                return path
            if time.monotonic() > end:
                self._local = False  # it has none: do not wait again
            else:
                time.sleep(0.1)
        return None


def counters_of_page(page: str) -> Counters | None:
    """The counters on a page of metrics: bytes of all ranks, steps of the first ones."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for name, labels, value in _SERIES.findall(page):
        values: dict[str, str] = dict(_LABEL.findall(labels))
        every = name.startswith("deft_kv_")  # each rank reads its own part of the KV cache
        if not every and any(values.get(rank, "0") != "0" for rank in ("tp_rank", "pp_rank")):
            continue
        kind = values.get("kernel", values.get("reason", ""))
        total[name, kind] += float(value)
    if (STEPS.series, "tree") not in total:
        return None
    tree, host = total[STEPS.series, "tree"], total[STEPS.series, "host"]
    figures = {field: total[metric.series, ""] for field, metric in FIGURES.items()}
    return Counters(
        decode_steps=int(tree + host),
        steps_tree=int(tree),
        steps_host={why: int(n) for (name, why), n in total.items() if name == HOST_STEPS.series},
        **{name: n if name.endswith("_seconds") else int(n) for name, n in figures.items()},
    )

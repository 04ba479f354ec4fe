"""The plugin's counters of a server, from its state file or its page of metrics."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deft_backend.telemetry.counters import DECODE, KINDS, Content, Counters, Steps
from deft_backend.telemetry.metrics import CONTEXT, FIGURES, HOST_STEPS, ROWS, STEPS
from deft_backend.telemetry.state_reader import (
    StateError,
    StateReading,
    read_state,
    running_here,
    settled_counters,
)
from deft_backend.tools.servers.process import get_page


class ServerCounters:
    """Reads the counters of the server at a URL, if any, by ``/metrics`` or state files."""

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
            with suppress(StateError):  # a folder of another user
                path = running_here(self._folder, self._port)
                if path is not None:
                    return path
            if time.monotonic() > end:
                self._local = False  # it has none: do not wait again
            else:
                time.sleep(0.1)
        return None


def counters_of_page(page: str) -> Counters | None:
    """The counters on a page of metrics: bytes of all ranks, steps of the first ones."""
    total: dict[tuple[str, str, str], float] = defaultdict(float)
    for name, values, value in _samples(page):
        every = name.startswith("deft_kv_")  # each rank reads its own part of the KV cache
        if not every and any(values.get(rank, "0") != "0" for rank in ("tp_rank", "pp_rank")):
            continue
        kernel = values.get("kernel", values.get("reason", ""))
        total[name, values.get("kind", ""), kernel] += value
    if (STEPS.series, DECODE, "tree") not in total:
        return None
    figures: dict[str, Any] = {
        field: total[metric.series, "", ""]
        if field.endswith("_seconds")
        else int(total[metric.series, "", ""])
        for field, metric in FIGURES.items()
    }
    steps: dict[Content, Steps] = {}
    for kind in KINDS:
        tree, host = (
            [int(total[metric.series, kind, kernel]) for metric in (STEPS, ROWS, CONTEXT)]
            for kernel in ("tree", "host")
        )
        steps[Content(kind, None)] = Steps(*tree)
        # The page has rows and bytes of all reasons together: the first one gets them.
        for (name, of, reason), number in [*total.items()]:
            if (name, of) == (HOST_STEPS.series, kind) and number:
                steps[Content(kind, reason)] = Steps(int(number), *host[1:])
                host = [0, 0, 0]
    return Counters({content: of for content, of in steps.items() if of.steps}, **figures)


def _samples(page: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of each series on a page; none from a page that is none of metrics."""
    try:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value
    except (ImportError, ValueError):
        return

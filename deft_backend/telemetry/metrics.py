"""The server's counters as Prometheus metrics, on the host's own ``/metrics``. Two ways, by the
page: :func:`publisher` writes into the files of ``PROMETHEUS_MULTIPROC_DIR``;
:func:`register_states` reads state files in the API server. ``prometheus_client`` reads that
variable at import, and hosts set it only after they have loaded plugins.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deft_backend.telemetry.counters import KINDS, Counters, Place, StateName
from deft_backend.telemetry.state_reader import SILENT_SECONDS, StateError, read_state, state_files

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

logger = logging.getLogger("deft_backend")

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_NOT_SERVED = "the server's /metrics does not show tree attention; the log and `deft top` do"


class Metric(NamedTuple):
    """A counter; `name` lacks the suffix ``_total`` that the page adds."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        return f"{self.name}_total"


_OF_STEPS = ("kind", "kernel")
STEPS = Metric(
    "deft_decode_steps",
    "Steps that decode, by what they contain (decode, mixed with prefills, verification) and by "
    "the kernel that decoded.",
    _OF_STEPS,
)
ROWS = Metric(
    "deft_decode_rows", "Requests that decoded in those steps, once for each step.", _OF_STEPS
)
CONTEXT = Metric(
    "deft_decode_context_bytes",
    "KV bytes of those requests' contexts in all layers, once for each step.",
    _OF_STEPS,
)
HOST_STEPS = Metric(
    "deft_host_decode_steps",
    "Steps whose requests the host's kernel decoded, by reason.",
    ("kind", "reason"),
)
FIGURES = {
    "kv_bytes_read": Metric(
        "deft_kv_read_bytes", "KV bytes that decode attention read in all layers."
    ),
    "kv_bytes_query_guided": Metric(
        "deft_kv_query_guided_bytes", "KV bytes that those steps would have read query by query."
    ),
    "plans": Metric("deft_plans", "Plans of tree attention."),
    "plan_seconds": Metric("deft_plan_seconds", "Seconds spent on those plans."),
    "verified_tokens": Metric("deft_verified_tokens", "Query tokens that tree attention verified."),
    "compile_seconds": Metric(
        "deft_compile_seconds", "Seconds spent on compiling or loading kernels."
    ),
}
"""Metrics of one number, by the field of :class:`Counters` that holds it."""


Sample = tuple[Metric, tuple[str, ...], float]
"""A metric with the values of its labels, and its own."""


def samples(counters: Counters) -> Iterator[Sample]:
    for kind, kernel in product(KINDS, ("tree", "host")):
        total = counters.total(kind, tree=kernel == "tree")
        for metric, value in zip((STEPS, ROWS, CONTEXT), total, strict=True):
            yield metric, (kind, kernel), value
    for content, steps in counters.steps.items():
        if content.reason is not None:
            yield HOST_STEPS, (content.kind, content.reason), steps.steps
    for field, metric in FIGURES.items():
        yield metric, (), getattr(counters, field)


def page_of_files() -> bool:
    """Whether the host makes the page from files of all processes; known only after its start."""
    return MULTIPROCESS in os.environ


@cache
def _value_class() -> Any:
    """The class that writes a value into the files, whatever a parent imported before the fork."""
    from prometheus_client import values

    known: Any = values.ValueClass
    make: Any = values.MultiProcessValue
    return known if known._multiprocess else make()


@cache
def _value(metric: Metric, labels: tuple[str, ...], ranks: tuple[tuple[str, str], ...]) -> Any:
    """A series of this process. One object: two would overwrite each other's entry."""
    names = (*metric.labels, *(name for name, _ in ranks))
    values = (*labels, *(rank for _, rank in ranks))
    return _value_class()("counter", metric.name, metric.series, names, values, metric.meaning)


class Publisher:
    """Adds the growth of the counters since the last call to this process's file."""

    def __init__(self, ranks: Mapping[str, str]) -> None:
        self._ranks = tuple(ranks.items())
        self._published: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self(Counters())

    def __call__(self, counters: Counters) -> None:
        for metric, labels, value in samples(counters):
            # From here on the page shows the series, at least at zero.
            series = _value(metric, labels, self._ranks)
            grown = value - self._published.get((metric, labels), 0)
            if grown > 0:
                series.inc(grown)
                self._published[metric, labels] = value


def publisher(ranks: Mapping[str, str]) -> Publisher | None:
    """A listener that publishes this process's counters; None, with a log line, if the page cannot.
    Call it after the host has set ``PROMETHEUS_MULTIPROC_DIR``.
    """
    if not page_of_files():
        logger.warning("deft: %s is not set; %s", MULTIPROCESS, _NOT_SERVED)
        return None
    try:
        return Publisher(ranks)
    except ImportError:
        logger.warning("deft: prometheus_client is not installed; %s", _NOT_SERVED)
    except Exception as error:  # a folder that cannot be written, another version of the client
        logger.warning("deft: the metrics cannot be published (%r); %s", error, _NOT_SERVED)
    return None


class StateCollector:
    """Collects the counters of one server from its processes' state files, at every scrape."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self._port = port

    def describe(self) -> list[CounterMetricFamily]:
        return list(_families().values())

    def collect(self) -> list[CounterMetricFamily]:
        """A family for each metric; never raises, which would cost the host its page."""
        families = _families()
        for name, counters in _living(self._directory, self._port):
            for metric, values, value in samples(counters):
                labels = {**dict(zip(metric.labels, values, strict=True)), **name.labels}
                families[metric].add_sample(metric.series, labels, value)
        return [family for family in families.values() if family.samples]


def register_states(directory: Path, port: int, registry: CollectorRegistry | None = None) -> None:
    """Make a registry show the counters of the server on `port`, in the API server's process. If it
    fails, the log says so; it does nothing if the host makes the page from files.
    """
    if page_of_files():
        return
    try:
        from prometheus_client import REGISTRY

        (registry or REGISTRY).register(StateCollector(directory, port))
    except Exception as error:  # a package is missing, or the registry shows them already
        logger.warning("deft: the metrics cannot be registered (%r); %s", error, _NOT_SERVED)


def _families() -> dict[Metric, CounterMetricFamily]:
    from prometheus_client.core import CounterMetricFamily

    metrics = (STEPS, ROWS, CONTEXT, HOST_STEPS, *FIGURES.values())
    return {metric: CounterMetricFamily(metric.name, metric.meaning) for metric in metrics}


def _living(folder: Path, port: int) -> Iterator[tuple[StateName, Counters]]:
    """Of this machine's processes whose writers show a sign of life: a file that an earlier server
    left has none, even if another program has its process id.
    """
    with suppress(StateError):  # a folder that cannot be read
        for file in state_files(folder, port):
            recent = time.time() - file.seen < SILENT_SECONDS
            if recent and file.lives and file.name.place == Place.here():
                with suppress(StateError):
                    yield file.name, read_state(file.path).counters

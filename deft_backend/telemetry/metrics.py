"""The server's counters as Prometheus metrics, on the host's own ``/metrics``.

Two ways, by how the host makes that page (:func:`page_of_files`):

- From the files that all its processes write into ``PROMETHEUS_MULTIPROC_DIR`` (SGLang; vLLM with
  several API servers): :func:`publisher`, a listener of the state's writer, in the process that
  decodes.
- From a registry in the API server's process (vLLM with one API server), while another process
  decodes: :func:`register_states` there, which reads the state files of the server's port.

Nothing here runs in the thread that decodes, and ``prometheus_client`` is imported in these
functions only: it chooses its mode when it is imported, by that variable, which hosts set later
than they load plugins.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deft_backend.telemetry.counters import SCHEMA, Counters

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

logger = logging.getLogger("deft_backend")

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_NOT_SERVED = "the server's /metrics does not show tree attention"


class Metric(NamedTuple):
    """A counter; `name` is without the suffix ``_total`` that it is exposed with."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


STEPS = Metric("deft_decode_steps", "Decode steps, by the kernel that ran them.", ("kernel",))
HOST_STEPS = Metric(
    "deft_host_decode_steps", "Decode steps of the host's own kernel, by reason.", ("reason",)
)
READ = Metric("deft_kv_read_bytes", "Bytes of KV cache that decode attention read, all layers.")
GUIDED = Metric(
    "deft_kv_query_guided_bytes",
    "Bytes of KV cache that reading every request's whole context would have read.",
)
PLANS = Metric("deft_plans", "Plans of tree attention, made on the host or on the device.")
PLAN_SECONDS = Metric("deft_plan_seconds", "Seconds in which those plans were made.")
METRICS = (STEPS, HOST_STEPS, READ, GUIDED, PLANS, PLAN_SECONDS)


class Sample(NamedTuple):
    """One series' value; `labels` are the values of the metric's labels."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


def samples(counters: Counters) -> Iterator[Sample]:
    """Every series of a reading. Series without a reason are there from the start, at zero."""
    yield Sample(STEPS, ("tree",), counters.steps_tree)
    yield Sample(STEPS, ("host",), sum(counters.steps_host.values()))
    for reason, steps in counters.steps_host.items():
        yield Sample(HOST_STEPS, (reason,), steps)
    yield Sample(READ, (), counters.kv_bytes_read)
    yield Sample(GUIDED, (), counters.kv_bytes_query_guided)
    yield Sample(PLANS, (), counters.plans)
    yield Sample(PLAN_SECONDS, (), counters.plan_seconds)


def rank_labels(path: Path) -> dict[str, str]:
    """Which process of a server wrote a state file, as labels.

    >>> rank_labels(Path("30000-tp1-pp0.json"))
    {'tp_rank': '1', 'pp_rank': '0'}
    """
    return {f"{kind}_rank": rank for kind, rank in re.findall(r"-(tp|pp|dp)(\d+)", path.stem)}


def page_of_files() -> bool:
    """Whether the page is made from files of all processes; known once a server starts them."""
    return MULTIPROCESS in os.environ


@cache
def _value_class() -> Any:
    """What writes a value into the files: the client's own class, if that is its mode.

    It is not in a process that was forked from one that had imported the client before.
    """
    from prometheus_client import values

    known: Any = values.ValueClass
    make: Any = values.MultiProcessValue
    return known if known._multiprocess else make()


@cache
def _value(metric: Metric, labels: tuple[str, ...], ranks: tuple[tuple[str, str], ...]) -> Any:
    """A series of this process; one object, since two would overwrite each other's entry."""
    names = (*metric.labels, *(name for name, _ in ranks))
    values = (*labels, *(rank for _, rank in ranks))
    return _value_class()(
        "counter", metric.name, f"{metric.name}_total", names, values, metric.meaning
    )


class Publisher:
    """Adds to this process's file what the counters have grown by since the last call.

    Parameters
    ----------
    ranks : mapping
        Labels of this process: its ranks, of the kinds that tell the server's processes apart.
    """

    def __init__(self, ranks: Mapping[str, str]) -> None:
        self._ranks = tuple(ranks.items())
        self._published: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self(Counters())

    def __call__(self, counters: Counters) -> None:
        for metric, labels, value in samples(counters):
            series = _value(metric, labels, self._ranks)  # from here on there, be it at zero
            grown = value - self._published.get((metric, labels), 0)
            if grown > 0:
                series.inc(grown)
                self._published[metric, labels] = value


def publisher(ranks: Mapping[str, str]) -> Publisher | None:
    """What publishes this process's counters, to be called by the writer of its state.

    Call it in the process that counts, not before the host has set ``PROMETHEUS_MULTIPROC_DIR``.

    Parameters
    ----------
    ranks : mapping
        See :class:`Publisher`; :func:`rank_labels` of the state file.

    Returns
    -------
    Publisher or None
        None, and one line in the log, if the host's page cannot show them.
    """
    if not page_of_files():
        logger.warning("deft: %s is not set; %s", MULTIPROCESS, _NOT_SERVED)
        return None
    try:
        return Publisher(ranks)
    except ImportError:
        logger.warning("deft: prometheus_client is not installed; %s", _NOT_SERVED)
    except Exception as error:  # a folder that cannot be written, another version of the client
        logger.warning("deft: %r; %s", error, _NOT_SERVED)
    return None


class StateCollector:
    """Collects the counters of one server from its processes' state files, at every scrape.

    A file counts if the process that wrote it lives: files of an earlier server on the same port
    stay behind. A file that cannot be read is left out, as its process's counters would be.
    """

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self._port = port

    def describe(self) -> list[CounterMetricFamily]:
        """What the registry asks for names, without reading a file."""
        return list(_families().values())

    def collect(self) -> list[CounterMetricFamily]:
        """A family a metric, with the series of every process; none where nothing was counted."""
        families = _families()
        for path in sorted(self._directory.glob(f"{self._port}-tp*.json")):
            counters = _living(path)
            if counters is None:
                continue
            ranks = rank_labels(path)
            for metric, values, value in samples(counters):
                labels = {**dict(zip(metric.labels, values, strict=True)), **ranks}
                families[metric].add_sample(f"{metric.name}_total", labels, value)
        return [family for family in families.values() if family.samples]


def register_states(directory: Path, port: int, registry: CollectorRegistry | None = None) -> None:
    """Make a registry show the counters that the processes of a server write into their files.

    For a host whose ``/metrics`` is made from a registry of the API server's process: call it
    there, once and at any time. What fails is said in one line of the log. Where the page is made
    from files instead, nothing is registered: :func:`publisher` is the way.

    Parameters
    ----------
    directory : Path
        Where the server's processes write: :func:`deft_backend.folders.state_directory`.
    port : int
        The server's; the state files bear it.
    registry : CollectorRegistry, optional
        That of the page; default: the client's global one.
    """
    if page_of_files():
        return
    try:
        import psutil  # noqa: F401  # told here if missing, not when the page is asked for
        from prometheus_client import REGISTRY

        (registry or REGISTRY).register(StateCollector(directory, port))
    except Exception as error:  # a package is missing, or the registry shows them already
        logger.warning("deft: %r; %s", error, _NOT_SERVED)


def _families() -> dict[Metric, CounterMetricFamily]:
    from prometheus_client.core import CounterMetricFamily

    return {metric: CounterMetricFamily(metric.name, metric.meaning) for metric in METRICS}


def _living(path: Path) -> Counters | None:
    """The counters in a state file, if it is of this version and its process lives."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["schema"] != SCHEMA or not _wrote(content["pid"], content["updated"]):
            return None
        return Counters.from_json(content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _wrote(pid: int, updated: float) -> bool:
    """Whether the process that now has an id is the one that wrote under it at a time."""
    import psutil

    try:
        return bool(psutil.Process(pid).create_time() <= updated + 1.0)
    except psutil.Error:
        return False

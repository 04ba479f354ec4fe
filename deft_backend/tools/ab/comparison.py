"""The A/B run: the same requests to the host's own backend and then to the plugin."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from deft_backend.files.provenance import provenance
from deft_backend.telemetry.state_reader import (
    Counters,
    StateError,
)
from deft_backend.tools.ab.agreement import Agreement, compare
from deft_backend.tools.harness.counted_server import CountedServer
from deft_backend.tools.harness.request_plan import Request, RequestPlan
from deft_backend.tools.harness.send_plan import Answered, PlanError, answer_plan
from deft_backend.tools.servers.command import (
    BACKEND,
    BACKEND_NAMES,
    ServerCommand,
    free_port,
    server_command,
)
from deft_backend.tools.servers.speculation import acceptance_length

SIDES = ("host", "deft")

_REFUSED = re.compile("deft: .*(all attention|these layers) runs? through ")

_FIRST = RequestPlan("first contact", "not measured", (), (Request("hello", "Hello!", 4),))


class AbError(RuntimeError):
    """The comparison could not be made."""


class Watcher(Protocol):
    """Receives the progress of the run."""

    def starting(self, side: str, command: ServerCommand) -> Callable[[float], None]:
        """A server starts; the caller passes the seconds waited so far to the returned function."""
        ...

    def started(self, side: str) -> None:
        """The server answers."""
        ...

    def replaying(self, side: str, plan: RequestPlan) -> Callable[[int], None]:
        """A workload begins; the caller passes numbers of new tokens to the returned function."""
        ...


@dataclass(frozen=True)
class AbSetup:
    """The inputs of a comparison.

    Attributes
    ----------
    model : str
        As for ``--model-path``.
    plans : sequence of RequestPlan
        Workloads, in order.
    policy, baseline : str, optional
        The plugin's policy and the host's attention backend; None means the default.
    host_arguments : sequence of str
        Arguments for both servers.
    host : str
        The host whose servers run.
    """

    model: str
    plans: Sequence[RequestPlan]
    policy: str | None = None
    baseline: str | None = None
    host_arguments: Sequence[str] = ()
    host: str = "sglang"


@dataclass(frozen=True)
class Measured:
    """One workload on one side. Times in seconds; `counters` None if the plugin counted nothing."""

    ttft: float
    tpot: float | None
    tokens_a_second: float
    seconds: float
    counters: Counters | None


@dataclass(frozen=True)
class KvRead:
    """Bytes of KV that a decode step of the plugin's server reads, all layers, on average.

    Both figures are for the same steps. The other server's steps hold other requests, because its
    answers start and end at other times.

    Attributes
    ----------
    query_by_query : float
        Bytes that those steps would read if every query read its whole context, as in the host's
        kernel.
    deft : float
        Bytes that they read.
    """

    query_by_query: float
    deft: float

    @property
    def saved(self) -> float | None:
        """Share of the reads that the plugin saves, 0 to 1; None if there is nothing to read."""
        return 1.0 - self.deft / self.query_by_query if self.query_by_query else None


@dataclass(frozen=True)
class Compared:
    """One workload on both sides."""

    workload: str
    description: str
    requests: int
    tokens: int
    host: Measured
    deft: Measured
    agreement: Agreement

    @property
    def kv_read(self) -> KvRead | None:
        """KV reads of the plugin's server; None if the plugin counted no step."""
        counted = self.deft.counters
        if counted is None or not counted.decode_steps:
            return None
        return KvRead(
            counted.kv_bytes_query_guided / counted.decode_steps,
            counted.kv_bytes_read / counted.decode_steps,
        )


@dataclass(frozen=True)
class AbResult:
    """Everything the report shows."""

    workloads: tuple[Compared, ...]
    on_gpu: bool
    model: str
    policy: str
    commands: Mapping[str, str]
    backends: Mapping[str, str]
    provenance: Mapping[str, object]
    acceptance_length: Mapping[str, float | None] | None = None
    """Tokens that each server's verifications gave on average; None if it does not speculate."""

    @property
    def same(self) -> bool:
        """Whether every answer has the same tokens."""
        return all(workload.agreement.same for workload in self.workloads)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the derived figures that the report shows."""
        content = asdict(self)
        for record, workload in zip(content["workloads"], self.workloads, strict=True):
            read = workload.kv_read
            record["kv_bytes_a_step"] = None if read is None else asdict(read)
            record["kv_saved"] = None if read is None else read.saved
            record["agreement"]["same"] = workload.agreement.same
        return {"schema": 2, "same": self.same, **content}


@dataclass(frozen=True)
class _Side:
    answered: tuple[Answered, ...]
    counters: tuple[Counters | None, ...]
    command: ServerCommand
    backend: str
    policy: str
    acceptance_length: float | None


def run_ab(setup: AbSetup, logs: Path, watcher: Watcher) -> AbResult:
    """Run both servers, one after the other, and compare.

    Parameters
    ----------
    setup : AbSetup
        What to compare.
    logs : Path
        Folder for the servers' logs, ``host.log`` and ``deft.log``.
    watcher : Watcher
        Receives the progress.

    Raises
    ------
    StartError, DriverStubError, PlanError, AbError
        If a server does not start, a request fails, or the plugin did nothing.
    """
    sides = {side: _run_side(side, setup, logs, watcher) for side in SIDES}
    host, deft = sides["host"], sides["deft"]
    workloads = tuple(
        Compared(
            workload=plan.workload,
            description=plan.description,
            requests=len(plan.requests),
            tokens=plan.tokens,
            host=_measure(host.answered[i], host.counters[i]),
            deft=_measure(deft.answered[i], deft.counters[i]),
            agreement=compare(host.answered[i], deft.answered[i]),
        )
        for i, plan in enumerate(setup.plans)
    )
    return AbResult(
        workloads=workloads,
        on_gpu=deft.command.on_gpu,
        model=setup.model,
        policy=deft.policy,
        commands={side: run.command.shell() for side, run in sides.items()},
        backends={side: run.backend for side, run in sides.items()},
        provenance=provenance(),
        acceptance_length=_acceptance(sides),
    )


def _run_side(side: str, setup: AbSetup, logs: Path, watcher: Watcher) -> _Side:
    def command(state_folder: Path) -> ServerCommand:
        observe = {"DEFT_OBSERVE": "1"} if side == "host" else {}
        return server_command(
            setup.model,
            free_port(),
            host=setup.host,
            backend=setup.baseline if side == "host" else BACKEND,
            policy=setup.policy if side == "deft" else None,
            host_arguments=setup.host_arguments,
            environment={"DEFT_STATE_DIR": str(state_folder), **observe},
        )

    log = logs / f"{side}.log"
    answered: list[Answered] = []
    counters: list[Counters | None] = []
    with CountedServer(command, log, on_start=partial(watcher.starting, side)) as server:
        watcher.started(side)
        try:
            answer_plan(_FIRST, server.url)  # the counters start with the first decode step
            counts = server.counts()
            for plan in setup.plans:
                before = server.counters() if counts else None
                answered.append(answer_plan(plan, server.url, watcher.replaying(side, plan)))
                after = server.counters() if counts else None
                counters.append(after - before if after and before else None)
        except (PlanError, StateError) as error:
            server.process.check_alive()  # a server that has ended is the cause: report it
            raise AbError(f"{side} server: {error}. Its log is {log}") from error
        backend, policy = _names(side, setup, server if counts else None)
        started = server.command
        accepted = acceptance_length(setup.host, server.url)
    if side == "deft" and not any(counted and counted.decode_steps for counted in counters):
        said = refusal(log.read_text(errors="replace"))
        raise AbError(
            f"the server was started with --attention-backend {BACKEND_NAMES[setup.host]}, but "
            + (f"it says {said!r}. " if said else "the plugin wrote no counts; run 'deft doctor'. ")
            + f"The log is {log}"
        )
    return _Side(tuple(answered), tuple(counters), started, backend, policy, accepted)


def refusal(log: str) -> str | None:
    """The line in which the plugin leaves a server to its host's own backend; None: no line."""
    found = [line[line.index("deft: ") :] for line in log.splitlines() if _REFUSED.search(line)]
    return found[-1] if found else None


def _acceptance(sides: Mapping[str, _Side]) -> Mapping[str, float | None] | None:
    found = {side: run.acceptance_length for side, run in sides.items()}
    return found if any(length is not None for length in found.values()) else None


def _names(side: str, setup: AbSetup, server: CountedServer | None) -> tuple[str, str]:
    """Backend and policy as the server reports them, or else as the user chose them."""
    asked = setup.policy or os.environ.get("DEFT_POLICY") or "auto"
    if server is not None:
        with suppress(StateError):
            found = server.state()
            return found.backend, found.policy
    return (setup.baseline or "host default") if side == "host" else BACKEND, asked


def _measure(run: Answered, counters: Counters | None) -> Measured:
    gaps = [answer.tpot for answer in run.answers if answer.tpot is not None]
    tokens = sum(len(answer) for answer in run.answers)
    return Measured(
        ttft=statistics.median(answer.ttft for answer in run.answers),
        tpot=statistics.median(gaps) if gaps else None,
        tokens_a_second=tokens / run.seconds,
        seconds=run.seconds,
        counters=counters,
    )

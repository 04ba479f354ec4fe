"""From what a user asks for to a run: the model, the servers and the workloads, all checked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.e2e.backend_runs import Setup
from benchmarks.e2e.backends import HOSTS, Launch, ServerChoiceError, checked_backends
from benchmarks.e2e.checked_answers import TOLERANCE
from benchmarks.e2e.host_clients import (
    GENERATED_SHARED_PREFIX,
    PREFIX_REPETITION,
    HostClient,
)
from benchmarks.e2e.prompt_cases import (
    GRID,
    SCHEDULER_GRID,
    Case,
    CaseError,
    Documents,
    check_fits,
    grid_case,
    parse_case,
)
from benchmarks.e2e.served_model import (
    SHAPES,
    WEIGHTS,
    Model,
    ModelError,
    read_model,
    write_model,
    written_model,
)
from benchmarks.e2e.served_workloads import HostsOwn, Mixed, Together, Tree, Workload
from benchmarks.e2e.traffic import Traffic
from benchmarks.e2e.tree_replay import longest_path, recorded_trees
from deft_backend.traces.trace_files import TraceError

WORKLOADS = ("grid", "documents", "trees", "clients", "traffic", "scheduler")

MANY_IDS = 250_000
"""Token ids of a batch from which on it is sent less often."""

SCHEDULER_REPEATS = 12
"""On a GPU: the scheduler's steps are in one of two states, a third apart, for seconds at a time,
whichever backend runs."""

CPU_GRID = ((0, 2, 64), (256, 4, 16))
"""Cases on a machine without a GPU, where only whether it works can be seen."""

CPU_DOCUMENTS = Documents(
    documents=2, tokens=192, questions=2, question_tokens=8, loners=2, loner_tokens=48
)


class ChoiceError(ValueError):
    """What was asked for cannot be measured."""


ERRORS = (ChoiceError, CaseError, ModelError, ServerChoiceError, TraceError)
"""What :func:`prepared` raises for what a user can mend."""


@dataclass(frozen=True)
class Choice:
    """What a user asks for; None: what fits this machine.

    Attributes
    ----------
    out : Path
        File of rows.
    command : str
        As it was typed.
    host : str
    backends, workloads : sequence of str, optional
        The default workload is the grid.
    cases : sequence of str
        ``PREFIX,BRANCHES,SUFFIX`` in place of the default grid.
    gen, repeats : int, optional
        Output tokens that are timed, and how often; how often a tree is replayed at most.
    traces : Path, optional
        Recorded trees of thoughts, and a factor on their lengths.
    client_shapes : sequence of str, optional
    client_runs : int
    minutes, part, workers : optional
        Of mixed traffic.
    tolerance : float, optional
        Of its check; the default follows from the dtype.
    model : str, optional
        A checkpoint folder; else one of `shape` with `weights` is written, to `checkpoint` if
        given, where it is found again.
    options : sequence of str
        For the host's server.
    """

    out: Path
    command: str
    host: str = "sglang"
    backends: Sequence[str] | None = None
    reference: str | None = None
    workloads: Sequence[str] | None = None
    cases: Sequence[str] = ()
    gen: int | None = None
    repeats: int | None = None
    traces: Path | None = None
    scale: float = 1.0
    client_shapes: Sequence[str] | None = None
    client_runs: int = 1
    minutes: float = 8.0
    part: int = 1
    workers: int | None = None
    tolerance: float | None = None
    model: str | None = None
    shape: str | None = None
    weights: str = "random"
    checkpoint: Path | None = None
    options: Sequence[str] = ()
    logs: Path | None = None
    start_seconds: float = 500.0


@contextmanager
def prepared(choice: Choice) -> Iterator[Setup]:
    """What :func:`benchmarks.e2e.backend_runs.record` runs; the checkpoint lasts for the block.

    Raises
    ------
    ChoiceError, CaseError, ModelError, ServerChoiceError, TraceError
        If something cannot be: before any server is started.
    """
    host = HOSTS[_one_of("the host", choice.host, HOSTS)]
    backends = checked_backends(host, choice.backends or host.defaults())
    names = [_one_of("the workload", name, WORKLOADS) for name in choice.workloads or ("grid",)]
    if not names or not backends:
        raise ChoiceError("there is nothing to measure; name a workload and a backend")
    on_gpu = host.on_gpu()
    shape = choice.shape or _default_shape(names, on_gpu)
    _one_of("the shape", shape, SHAPES)
    _one_of("the weights", choice.weights, WEIGHTS)
    if "scheduler" in names and (choice.model or shape != "one-layer" or len(names) > 1):
        raise ChoiceError(
            "the workload scheduler measures another model, --shape one-layer; run it by itself"
        )
    if "traffic" in names and choice.weights == "dummy" and not choice.model:
        raise ChoiceError(
            "the workload traffic checks tokens, which dummy weights make without attention; "
            "expected --weights random"
        )
    with tempfile.TemporaryDirectory(prefix="deft-e2e-model-") as temporary:
        model = _model(choice, shape, Path(temporary), "bfloat16" if on_gpu else "float32")
        launch = Launch(host, model, tokenizer="clients" in names, options=tuple(choice.options))
        workloads = [w for name in names for w in _workloads(name, choice, model, on_gpu)]
        yield Setup(
            launch, backends, choice.reference or host.reference(), workloads, choice.out,
            choice.logs or choice.out.with_suffix(".logs"), choice.command, choice.start_seconds,
        )  # fmt: skip


def _default_shape(names: Sequence[str], on_gpu: bool) -> str:
    if "scheduler" in names:
        return "one-layer"
    return "llama-3.1-8b" if on_gpu else "tiny"


def _model(choice: Choice, shape: str, temporary: Path, served: str) -> Model:
    if choice.model is not None:
        return read_model(choice.model)
    if choice.checkpoint is None:
        return write_model(temporary, shape, choice.weights, served)
    folder = choice.checkpoint / f"{shape}-{choice.weights}"
    complete = folder / "complete"
    if not complete.is_file():
        write_model(folder, shape, choice.weights, served)
        complete.touch()
    return written_model(folder, shape, choice.weights, served)


def _workloads(name: str, choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    gen = choice.gen or (256 if on_gpu else 8)
    if name in ("grid", "scheduler"):
        scheduler = name == "scheduler"
        default = SCHEDULER_GRID if scheduler else GRID if on_gpu else CPU_GRID
        sizes = [parse_case(text) for text in choice.cases] or default
        if scheduler:
            gen = choice.gen or 512
        for prefix, branches, suffix in sizes:
            case = grid_case(model, prefix, branches, suffix, name if scheduler else "")
            check_fits(case, gen + 1, model)
            repeats = SCHEDULER_REPEATS if scheduler and on_gpu else _repeats(case, on_gpu)
            yield Together(case, gen, choice.repeats or repeats, fastest=scheduler)
    elif name == "documents":
        case = (Documents() if on_gpu else CPU_DOCUMENTS).case(model)
        check_fits(case, gen + 1, model)
        yield Together(case, gen, choice.repeats or _repeats(case, on_gpu))
    elif name == "trees":
        yield from _trees(choice, model, on_gpu)
    elif name == "clients":
        yield from _clients(choice, on_gpu)
    else:
        traffic = _traffic(choice, on_gpu)
        if traffic.longest > model.context:
            raise CaseError(
                f"mixed traffic has requests of {traffic.longest} tokens; {model.name} takes "
                f"{model.context}"
            )
        tolerance = choice.tolerance
        if tolerance is None:
            tolerance = TOLERANCE["bfloat16" if on_gpu else "float32"]
        yield Mixed(traffic, tolerance)


def _repeats(case: Case, on_gpu: bool) -> int:
    """Fewer where requests are so long that sending them takes most of the time."""
    if not on_gpu:
        return 1
    return 3 if sum(len(prompt) for prompt in case.prompts) > MANY_IDS else 7


def _trees(choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    if choice.traces is None:
        raise ChoiceError(
            "the workload trees replays recorded trees; name their file or folder with --traces"
        )
    for name, tree in recorded_trees(choice.traces, choice.scale):
        if (longest := longest_path(tree)) > model.context:
            raise ChoiceError(
                f"{name} has requests of {longest} tokens, {model.name} takes {model.context}; "
                "choose a smaller --scale"
            )
        repeats = choice.repeats or (3 if on_gpu else 1)
        yield Tree(name if choice.scale == 1 else f"{name} × {choice.scale:g}", tree, repeats)


def _clients(choice: Choice, on_gpu: bool) -> Iterator[Workload]:
    known = GENERATED_SHARED_PREFIX if choice.host == "sglang" else PREFIX_REPETITION
    for shape in choice.client_shapes or (("default", "64-groups") if on_gpu else ("tiny",)):
        client = HostClient(choice.host, _one_of("the client's shape", shape, known))
        yield HostsOwn(client, choice.client_runs)


def _traffic(choice: Choice, on_gpu: bool) -> Traffic:
    if on_gpu:
        return Traffic(choice.minutes, workers=choice.workers or 64, part=choice.part)
    return Traffic(
        choice.minutes, workers=choice.workers or 6, documents=24, document_tokens=1024,
        most_question_tokens=32, most_answer_tokens=16, samples=60, part=choice.part,
    )  # fmt: skip


def _one_of(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name not in names:
        raise ChoiceError(f"{what} is {name!r}; expected one of {', '.join(names)}")
    return name

"""Turn the user's choice into workloads that fit the machine and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from benchmarks.e2e.checked_answers import tolerance_of
from benchmarks.e2e.choice import Choice, ChoiceError, one_of
from benchmarks.e2e.first_tokens import TOKENS, FirstTokens
from benchmarks.e2e.host_clients import GENERATED_SHARED_PREFIX, PREFIX_REPETITION, HostClient
from benchmarks.e2e.mixed_traffic import Traffic
from benchmarks.e2e.prompt_cases import (
    GRID,
    SCHEDULER_GRID,
    Case,
    CaseError,
    Documents,
    check_fits,
    grid_case,
    parse_sizes,
)
from benchmarks.e2e.served_model import Model
from benchmarks.e2e.served_workloads import HostsOwn, Mixed, Together, Tree, Workload
from benchmarks.e2e.tree_replay import longest_path, recorded_trees
from benchmarks.e2e.tree_shapes import Beams, Rollouts, Sessions, TreeShape
from benchmarks.e2e.tree_traffic import TreeTraffic
from deft_backend.tools.servers.command import value_of

MANY_IDS = 250_000
"""A batch with more token ids than this has fewer repeats."""

SCHEDULER_REPEATS = 12
"""Repeats on a GPU. The scheduler's steps are in one of two states, a third apart, for seconds at a
time, with every backend."""

CPU_GRID = ((0, 2, 64), (256, 4, 16))
"""Cases on a machine without a GPU, where only the answers can be checked."""

FIRST_TOKENS = ((4096, 32, 64), (4096, 64, 64), (4096, 128, 64))
"""Requests that arrive at once behind a cached prefix."""

CPU_FIRST_TOKENS = ((256, 4, 16),)

DRAFT_TREES = tuple(
    (prefix, requests, 64) for prefix in (2000, 8000, 16000) for requests in (1, 8, 32)
)
"""Requests behind a cached prefix, on servers that draft (``--drafts``)."""

_Numbers = tuple[int, int, int]

GROWN: Mapping[str, tuple[Callable[..., TreeShape], Sequence[_Numbers], int]] = {
    "beams": (Beams, [(p, w, 1) for p in (100, 4096, 16384) for w in (4, 32, 128, 256)], 65),
    "rollouts": (
        Rollouts, [(2000, 16, 16), (8000, 16, 16), (2000, 64, 1), (8000, 64, 1)], 8000,
    ),
    "agents": (Sessions, [(20000, 8, 256), (20000, 32, 256), (100000, 8, 256)], 128),
    "chats": (partial(Sessions, forks=0), [(2048, 64, 16), (8192, 64, 16)], 128),
}  # fmt: skip
"""Trees that people grow: the shape, its default sizes and its output tokens on a GPU."""

CPU_GROWN: Mapping[str, tuple[Sequence[_Numbers], int]] = {
    "beams": ([(64, 4, 1)], 8), "rollouts": ([(64, 4, 2)], 24), "agents": ([(96, 2, 8)], 6),
    "chats": ([(96, 3, 8)], 6),
}  # fmt: skip

CPU_DOCUMENTS = Documents(
    documents=2, tokens=192, questions=2, question_tokens=8, loners=2, loner_tokens=48
)


def chosen_workloads(name: str, choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    """The workloads of one name, out of :data:`benchmarks.e2e.choice.WORKLOADS`.

    Raises
    ------
    ChoiceError, CaseError, TraceError
        If the choice is incomplete, or a request does not fit the model's context.
    """
    if name in ("grid", "scheduler"):
        yield from _grid(choice, model, on_gpu, scheduler=name == "scheduler")
    elif name == "first-tokens":
        yield from _first_tokens(choice, model, on_gpu)
    elif name == "documents":
        case = (Documents() if on_gpu else CPU_DOCUMENTS).case(model)
        yield _together(case, choice, model, on_gpu)
    elif name == "trees":
        yield from _trees(choice, model, on_gpu)
    elif name == "draft-trees":
        yield from _draft_trees(choice, model, on_gpu)
    elif name in GROWN:
        yield from _grown(name, choice, model, on_gpu)
    elif name == "clients":
        yield from _clients(choice, on_gpu)
    else:
        yield _traffic(choice, model, on_gpu)


def _grid(choice: Choice, model: Model, on_gpu: bool, *, scheduler: bool) -> Iterator[Workload]:
    default = SCHEDULER_GRID if scheduler else GRID if on_gpu else CPU_GRID
    for (prefix, branches, suffix), gen in _cases(
        "scheduler" if scheduler else "grid", choice, default
    ):
        case = grid_case(model, prefix, branches, suffix, "scheduler" if scheduler else "")
        yield _together(case, choice, model, on_gpu, gen, scheduler=scheduler)


def _first_tokens(choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    default = FIRST_TOKENS if on_gpu else CPU_FIRST_TOKENS
    repeats = choice.batches.repeats or (10 if on_gpu else 2)
    for (prefix, branches, suffix), _ in _cases("first-tokens", choice, default):
        if not prefix:
            raise CaseError(
                "first-tokens measures requests behind a cached prefix; expected a prefix of 1 "
                "token or more"
            )
        check_fits(grid_case(model, prefix, 1, suffix), TOKENS, model)
        yield FirstTokens(prefix, branches, suffix, repeats)


def _draft_trees(choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    if choice.servers.drafts is None:
        raise ChoiceError(
            "the workload draft-trees measures servers that draft; say how with --drafts, such as "
            "--drafts eagle,60,3"
        )
    for sizes, gen in _cases("draft-trees", choice, DRAFT_TREES if on_gpu else CPU_GRID):
        yield _together(grid_case(model, *sizes, "draft-trees"), choice, model, on_gpu, gen)


def _grown(name: str, choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    make, sizes, tokens = GROWN[name]
    if not on_gpu:
        sizes, tokens = CPU_GROWN[name]
    for each, gen in _cases(name, choice, sizes):
        shape = make(*each, gen or choice.batches.gen or tokens)
        if shape.longest > model.context:
            raise CaseError(
                f"{shape.name} has requests of {shape.longest} tokens; {model.name} takes "
                f"{model.context}"
            )
        yield TreeTraffic(shape, choice.batches.repeats or (3 if on_gpu else 1))


def _cases(
    name: str, choice: Choice, default: Sequence[_Numbers]
) -> Iterator[tuple[_Numbers, int | None]]:
    """The user's cases of a workload, and their output tokens; the default ones if there are none.

    Raises
    ------
    CaseError
        If a case has another form, or is of a workload that is not measured.
    """
    asked = [parse_sizes(text) for text in choice.batches.cases]
    for each in asked:
        if each.workload not in (None, *choice.workloads):
            raise CaseError(
                f"--case names the workload {each.workload}; expected one of --workloads: "
                f"{', '.join(choice.workloads)}"
            )
    own = [each for each in asked if each.workload in (None, name)]
    yield from [(each.sizes, each.gen) for each in own] or [(sizes, None) for sizes in default]


def _together(
    case: Case,
    choice: Choice,
    model: Model,
    on_gpu: bool,
    gen: int | None = None,
    *,
    scheduler: bool = False,
) -> Together:
    gen = gen or choice.batches.gen or (512 if scheduler else 256 if on_gpu else 8)
    check_fits(case, gen + 1, model)
    repeats = SCHEDULER_REPEATS if scheduler and on_gpu else _repeats(case, on_gpu)
    return Together(case, gen, choice.batches.repeats or repeats, fastest=scheduler)


def _repeats(case: Case, on_gpu: bool) -> int:
    """Fewer repeats if sending the requests takes most of the time."""
    if not on_gpu:
        return 1
    return 3 if sum(len(prompt) for prompt in case.prompts) > MANY_IDS else 7


def _trees(choice: Choice, model: Model, on_gpu: bool) -> Iterator[Workload]:
    asked = choice.trees
    if asked.traces is None:
        raise ChoiceError(
            "the workload trees replays recorded trees; name their file or folder with --traces"
        )
    for name, tree in recorded_trees(asked.traces, asked.scale):
        if (longest := longest_path(tree)) > model.context:
            raise ChoiceError(
                f"{name} has requests of {longest} tokens, {model.name} takes {model.context}; "
                "choose a smaller --scale"
            )
        repeats = choice.batches.repeats or (3 if on_gpu else 1)
        yield Tree(name if asked.scale == 1 else f"{name} × {asked.scale:g}", tree, repeats)


def _clients(choice: Choice, on_gpu: bool) -> Iterator[Workload]:
    host = choice.servers.host
    known = GENERATED_SHARED_PREFIX if host == "sglang" else PREFIX_REPETITION
    for shape in choice.clients.shapes or (("default", "64-groups") if on_gpu else ("tiny",)):
        client = HostClient(host, one_of("the client's shape", shape, known))
        yield HostsOwn(client, choice.clients.runs)


def _traffic(choice: Choice, model: Model, on_gpu: bool) -> Mixed:
    asked = choice.traffic
    if on_gpu:
        traffic = Traffic(asked.minutes, workers=64, part=asked.part)
    else:
        traffic = Traffic(
            asked.minutes, workers=6, documents=24, document_tokens=1024,
            most_question_tokens=32, most_answer_tokens=16, samples=60, part=asked.part,
        )  # fmt: skip
    if traffic.longest > model.context:
        raise CaseError(
            f"mixed traffic has requests of {traffic.longest} tokens; {model.name} takes "
            f"{model.context}"
        )
    tolerance = asked.tolerance
    if tolerance is None:
        kv_dtype = value_of("--kv-cache-dtype", choice.servers.options)
        tolerance = tolerance_of("bfloat16" if on_gpu else "float32", kv_dtype)
    return Mixed(traffic, tolerance)

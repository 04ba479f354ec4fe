"""The table of workloads: their requests as token ids, the same on every machine.

Each entry makes a harness workload for sizes, output tokens and a repeat. A repeat has other ids
behind the shared prefix, so only the prefix is cached.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.e2e.launch import ChoiceError
from benchmarks.recorded_traces import load_trace
from deft_backend.tools.harness import programs
from deft_backend.tools.harness.programs import MARK, PROGRAMS, Sizes
from deft_backend.tools.harness.workload import Request, Workload, thought_requests
from deft_backend.tools.traces.arrivals import TraceError
from deft_backend.tools.traces.thought_trees import ROOT, ThoughtTree

BATCHES, REPLAY, BEAMS = "batches", "replay", "beams"
"""How a workload is timed (:mod:`benchmarks.e2e.timing`)."""

SHORTEST = 16
"""The longest answer of a rollout divided by its shortest one."""

Ids = tuple[int, ...]


Make = Callable[[Sizes, int, int, int], Workload]
"""Makes the requests for sizes, output tokens, a vocabulary, and the number of a repeat."""


def draw(chance: random.Random, vocabulary: int, count: int) -> Ids:
    """Random token ids below `vocabulary`."""
    return tuple(chance.choices(range(vocabulary), k=count))


def _chances(name: str, sizes: Sizes, repeat: int) -> tuple[random.Random, random.Random]:
    """For what all repeats share, and for what this one has alone."""
    return random.Random(f"{name} {sizes}"), random.Random(f"{name} {sizes} {repeat}")


def with_ids(name: str, make: programs.Make) -> Make:
    """The same workload for prompts of token ids."""

    def made(sizes: Sizes, gen: int, vocabulary: int, repeat: int) -> Workload:
        shared, own = _chances(name, sizes, repeat)
        parts = programs.Parts(partial(draw, shared, vocabulary), partial(draw, own, vocabulary))
        return make(sizes, gen, parts)

    return made


few_shot = with_ids("few-shot", programs.levels)


def documents(sizes: Sizes, gen: int, vocabulary: int, repeat: int) -> Workload:
    """Questions about several documents in random order; one request in five shares nothing."""
    shared, own = _chances("documents", sizes, repeat)
    texts = [draw(shared, vocabulary, sizes.prefix) for _ in range(document_count(sizes))]
    questions = max(1, 4 * sizes.branches // 5 // len(texts))
    prompts = [text + draw(own, vocabulary, sizes.suffix) for text in texts * questions]
    loners = sizes.branches - len(prompts)
    prompts += [draw(own, vocabulary, sizes.prefix // 8) for _ in range(loners)]
    own.shuffle(prompts)
    requests = tuple(Request(f"request {at}", each, gen) for at, each in enumerate(prompts))
    return Workload("documents", "", tuple(texts), requests)


def document_count(sizes: Sizes) -> int:
    """Documents of a batch of :func:`documents`."""
    return min(4, max(1, sizes.branches // 3))


def rollouts(sizes: Sizes, gen: int, vocabulary: int, repeat: int) -> Workload:
    """Samples of prompts, as a trainer draws them, with a long tail of lengths.

    Each of `suffix` prompts has `prefix` tokens and `branches` samples. Lengths are log-normal from
    the longest's sixteenth on. Every repeat has the same lengths, so that repeats differ by noise
    alone; repeat 0, which does not count, has short ones.
    """
    shared, own = _chances("rollouts", sizes, repeat)
    prompts = tuple(draw(own, vocabulary, sizes.prefix) for _ in range(sizes.suffix))
    least = max(1, gen // SHORTEST)
    lengths = [gen] + [
        min(gen, round(least * shared.lognormvariate(1.0, 0.8)) + least)
        for _ in range(sizes.suffix * sizes.branches - 1)
    ]
    requests = tuple(
        Request(
            f"sample {at}",
            prompts[at // sizes.branches],
            length if repeat else min(8, length),
            temperature=1.0,
        )
        for at, length in enumerate(lengths)
    )
    return Workload("rollouts", "", prompts, requests)


def sessions(sizes: Sizes, gen: int, vocabulary: int, repeat: int, *, forks: int) -> Workload:
    """Sessions on one history: each asks, forks sub-agents, and goes on with what they return.

    Without forks, a session is a chat, or calls of tools. It has two turns after the first.
    """
    shared, own = _chances(f"sessions {forks}", sizes, repeat)
    history = draw(shared, vocabulary, sizes.prefix)
    requests: list[Request] = []

    def ask(name: str, before: Ids = (), after: str | None = None, back: Sequence[str] = ()) -> str:
        prompt = before + draw(own, vocabulary, sizes.suffix)
        requests.append(Request(name, prompt, gen, after, returned=tuple(back)))
        return name

    for session in range(sizes.branches):
        last = ask(f"session {session}, start", history)
        for turn in range(2):
            agents = [
                ask(f"session {session}, fork {turn}.{fork}", after=last) for fork in range(forks)
            ]
            last = ask(f"session {session}, return {turn}", after=last, back=agents)
    return Workload("sessions", "", (history,), tuple(requests))


def beams(sizes: Sizes, gen: int, vocabulary: int, repeat: int) -> Workload:
    """One prompt, whose beam search forks in every step."""
    return few_shot(sizes._replace(branches=1), gen, vocabulary, repeat)


def thoughts(tree: ThoughtTree, sizes: Sizes, gen: int, vocabulary: int, repeat: int) -> Workload:
    """A recorded tree of thoughts: a thought's children start when it ends.

    All ids are of the repeat alone: the server still holds the earlier repeats' prefixes.
    """
    _, own = _chances("thoughts", sizes, repeat)
    prompt = draw(own, vocabulary, tree.nodes[ROOT].tokens)
    marks = {node: draw(own, vocabulary, MARK) for node in sorted(tree.nodes)}
    return Workload("tree", "", (prompt,), thought_requests(tree, prompt, marks.__getitem__))


@dataclass(frozen=True)
class Entry:
    """One workload of the table: its requests, its sizes and output tokens, and how it is timed."""

    make: Make
    how: str
    sizes: Sequence[tuple[int, int, int]]
    on_cpu: Sequence[tuple[int, int, int]]
    gen: int
    cpu_gen: int


_GRID = (
    (0, 1, 1024),
    (0, 32, 2048),
    (4096, 32, 64),
    (4096, 128, 64),
    (16384, 64, 64),
    (65536, 32, 64),
)
_DRAFTED = [(prefix, requests, 64) for prefix in (2000, 8000, 16000) for requests in (1, 8, 32)]
_BEAMS = [(prompt, width, 1) for prompt in (100, 4096, 16384) for width in (4, 32, 128, 256)]
_SAMPLED = ((2000, 16, 16), (8000, 16, 16), (2000, 64, 1), (8000, 64, 1))
_AGENTS = ((20000, 8, 256), (20000, 32, 256), (100000, 8, 256))

TABLE: Mapping[str, Entry] = {
    "grid": Entry(few_shot, BATCHES, _GRID, ((0, 2, 64), (256, 4, 16)), 256, 8),
    "draft-trees": Entry(few_shot, BATCHES, _DRAFTED, ((0, 2, 64), (256, 4, 16)), 256, 8),
    "documents": Entry(documents, BATCHES, ((8192, 80, 64),), ((192, 6, 8),), 256, 8),
    "rollouts": Entry(rollouts, REPLAY, _SAMPLED, ((64, 4, 2),), 8000, 24),
    "agents": Entry(partial(sessions, forks=3), REPLAY, _AGENTS, ((96, 2, 8),), 128, 6),
    "chats": Entry(
        partial(sessions, forks=0), REPLAY, ((2048, 64, 16), (8192, 64, 16)), ((96, 3, 8),), 128, 6
    ),
    **{
        name: Entry(
            with_ids(name, make),
            REPLAY if name == "chains" else BATCHES,
            (sizes,),
            ((96, 2 if name == "chains" else 8, 8),),
            256,
            8,
        )
        for name, (make, sizes) in PROGRAMS.items()
    },
    "beams": Entry(beams, BEAMS, _BEAMS, ((64, 4, 1),), 65, 8),
}
"""By name; ``trees`` replays recorded trees of thoughts (:func:`recorded_trees`)."""

TREES = "trees"
WORKLOADS = (*TABLE, TREES)


@dataclass(frozen=True)
class Job:
    """A workload to measure on every backend.

    `name` is its name in rows. `sizes` are None for a recorded tree, whose lengths are its own.
    """

    name: str
    make: Make
    how: str
    sizes: Sizes | None
    gen: int
    repeats: int | None = None
    seconds: float = 560.0

    def workload(self, vocabulary: int, repeat: int) -> Workload:
        """The requests of a repeat; repeat 0 does not count where a workload is replayed."""
        return self.make(self.sizes or Sizes(0, 0, 0), self.gen, vocabulary, repeat)


@dataclass(frozen=True)
class Case:
    """A case as the user typed it: of one workload or of each (None), with output tokens or not."""

    workload: str | None
    sizes: Sizes
    gen: int | None


def parse_case(text: str) -> Case:
    """``[WORKLOAD:]PREFIX,BRANCHES,SUFFIX[:TOKENS]``.

    Raises ChoiceError if the text has another form, or describes no request.

    >>> parse_case("rollouts:2000,16,16:1500")
    Case(workload='rollouts', sizes=Sizes(prefix=2000, branches=16, suffix=16), gen=1500)
    """
    found = re.fullmatch(r"(?:([a-z-]+):)?(\d+),([1-9]\d*),([1-9]\d*)(?::([1-9]\d*))?", text)
    if found is None:
        raise ChoiceError(
            f"the case {text!r} is not PREFIX,BRANCHES,SUFFIX: tokens, requests, tokens; expected "
            "for example 16384,64,64, with a prefix of 0 for prompts that share nothing"
        )
    workload, prefix, branches, suffix, gen = found.groups()
    sizes = Sizes(int(prefix), int(branches), int(suffix))
    return Case(workload, sizes, int(gen) if gen else None)


def chosen_jobs(
    names: Sequence[str],
    cases: Sequence[str],
    gen: int | None,
    repeats: int | None,
    traces: Path | None,
    *,
    on_gpu: bool,
) -> list[Job]:
    """The jobs of the named workloads, with the user's cases in place of the table's.

    Raises ChoiceError or TraceError if a name, a case or a recording is unknown.
    """
    asked = [parse_case(text) for text in cases]
    for name in [*names, *(each.workload for each in asked if each.workload is not None)]:
        allowed = WORKLOADS if name in names else tuple(names)
        if name not in allowed:
            raise ChoiceError(f"the workload {name!r}: expected one of {', '.join(allowed)}")
    jobs: list[Job] = []
    for name in names:
        if name == TREES:
            if traces is None:
                raise ChoiceError(
                    "the workload trees replays recorded trees; name their file or folder with "
                    "--traces"
                )
            for recorded, tree in recorded_trees(traces):
                title = f"tree-of-thoughts {recorded}"
                jobs.append(Job(title, partial(thoughts, tree), REPLAY, None, 0, repeats))
            continue
        entry = TABLE[name]
        own = [each for each in asked if each.workload in (None, name)]
        listed = entry.sizes if on_gpu else entry.on_cpu
        for case in own or [Case(name, Sizes(*sizes), None) for sizes in listed]:
            tokens = entry.gen if on_gpu else entry.cpu_gen
            tokens = case.gen or gen or tokens
            title = _title(name, case.sizes)
            jobs.append(Job(title, entry.make, entry.how, case.sizes, tokens, repeats))
    return jobs


def _title(name: str, sizes: Sizes) -> str:
    """The workload's name in rows."""
    if name == "grid":
        return "few-shot" if sizes.prefix else "unshared"
    if name == "documents":
        count = document_count(sizes)
        loners = sizes.branches - count * max(1, 4 * sizes.branches // 5 // count)
        return f"document-questions ({count} documents, {loners} loners)"
    return {"agents": "agents (3 sub-agents, 3 turns)", "chats": "chats (3 turns)"}.get(name, name)


def recorded_trees(path: Path) -> Iterator[tuple[str, ThoughtTree]]:
    """The tree with the most thoughts of each file of a folder, with a name of file and index.

    Token trees of speculative decoding are left out: servers decode one token per request. Raises
    TraceError if there is no tree of thoughts, or a file cannot be read.
    """
    found = False
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        trees = load_trace(file)
        if not isinstance(trees, list):
            continue
        index = max(range(len(trees)), key=lambda i: (len(trees[i].nodes), -i), default=None)
        if index is not None and len(trees[index].nodes) > 1:
            found = True
            yield f"{file.stem}[{index}]", trees[index]
    if not found:
        raise TraceError(f"{path} holds no tree of thoughts; expected DeFT's recorded trees")


def longest_request(workload: Workload) -> int:
    """Tokens of the longest request, with everything that stands before it and its answer."""
    ends: dict[str, int] = {}
    requests = {request.name: request for request in workload.requests}
    for request in workload.requests:
        before = ends[request.after] if request.after is not None else 0
        before += sum(requests[name].max_tokens for name in request.returned)
        ends[request.name] = before + len(request.own_part()) + request.max_tokens
    return max(ends.values())

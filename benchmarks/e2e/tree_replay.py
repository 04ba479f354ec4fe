"""Recorded trees of thoughts sent to a server, with the latency of every decode step.

A thought is a request of its recorded length. When it ends, its children start. A child's prompt is
the tokens so far and two ids of its own. Without them, greedy decoding would give all siblings the
same answer. A tree is replayed several times, because the time of one short replay depends on when
its few prefills happen.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.e2e.batch_timing import latencies
from benchmarks.e2e.prompt_cases import draw
from benchmarks.e2e.served_model import Model
from benchmarks.e2e.serving_rows import Row
from benchmarks.token_client.client import Client
from benchmarks.token_client.send_requests import send_requests
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Workload, thought_name, thought_requests
from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree, TraceError
from deft_backend.tools.traces.trace_files import load_trace

MARK = 2
"""Number of token ids that make a thought differ from its siblings."""

ENOUGH_SECONDS = 12.0
"""No further replay starts once the earlier ones together took longer than this."""

POINTS = 400
"""Largest number of points in a tree's plot; neighbouring steps share a point."""


@dataclass(frozen=True)
class ThoughtAnswer:
    """A thought's answer. The tree decodes its tokens in the iterations from `start` on."""

    start: int
    answer: Answer


@dataclass(frozen=True)
class Replay:
    """The result of one replay of a tree.

    Attributes
    ----------
    answers : list of ThoughtAnswer
        One answer for each thought.
    seconds : float
        From the first request to the last token.
    """

    answers: list[ThoughtAnswer]
    seconds: float

    @cached_property
    def steps(self) -> dict[int, float]:
        """Seconds of each iteration of the tree."""
        return step_latencies(self.answers)

    @property
    def tpot_ms(self) -> float:
        """Mean time of an iteration in ms, whatever its number of thoughts.

        0 if no thought has a second token.
        """
        return statistics.fmean(self.steps.values()) * 1e3 if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """All output tokens divided by the whole time."""
        return sum(len(found.answer) for found in self.answers) / self.seconds


def recorded_trees(path: Path, scale: float = 1.0) -> list[tuple[str, ThoughtTree]]:
    """The tree with the most thoughts of each file, with a name of file and index.

    Parameters
    ----------
    path : Path
        A file of trees of thoughts, or a folder. Token trees of speculative decoding are left out,
        because servers decode one token per request.
    scale : float
        Factor on all lengths.

    Raises
    ------
    TraceError
        If there is no tree of thoughts, or a file cannot be read.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = []
    for file in files:
        trees = load_trace(file)
        if not isinstance(trees, list):
            continue
        index = max(range(len(trees)), key=lambda i: (len(trees[i].nodes), -i), default=None)
        if index is not None and len(trees[index].nodes) > 1:
            tree = trees[index] if scale == 1.0 else trees[index].scaled(scale)
            found.append((f"{file.stem}[{index}]", tree))
    if not found:
        raise TraceError(f"{path} holds no tree of thoughts; expected DeFT's recorded trees")
    return found


def longest_path(tree: ThoughtTree) -> int:
    """Tokens of the longest request, with prompt and answer."""
    return max(
        sum(tree.nodes[above].tokens + MARK for above in tree.path(node)) for node in tree.nodes
    )


async def replay_tree(
    name: str,
    tree: ThoughtTree,
    model: Model,
    client: Client,
    row: Row,
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Replay a tree up to `repeats` times and put its figures into the row.

    ``tpot_ms`` and ``tokens_per_s`` are medians over the replays; the row's ``detail`` has the
    figures of each. Times to first token and gaps cover all replays' answers. ``seconds`` and
    ``steps_ms`` belong to the replay with the median time per token; of two, to the faster.

    Parameters
    ----------
    name : str
        The tree's name. It and the replay's number determine the token ids.
    tree : ThoughtTree
    model : Model
    client : Client
    row : Row
        Receives the figures.
    repeats : int
        Number of replays, at least 1; fewer if they take long (:data:`ENOUGH_SECONDS`).
    clock : callable
        Seconds.
    """
    replays: list[Replay] = []
    while len(replays) < repeats and sum(replay.seconds for replay in replays) <= ENOUGH_SECONDS:
        ids = random.Random(f"{name}, replay {len(replays)}")
        replays.append(await _replay(name, tree, model, client, ids, clock))
    by_time = sorted(replays, key=lambda replay: replay.tpot_ms)
    shown = by_time[(len(replays) - 1) // 2]
    latencies([answer.answer for replay in replays for answer in replay.answers], row)
    times = [replay.tpot_ms for replay in replays]
    speeds = [replay.tokens_per_s for replay in replays]
    row["tpot_ms"] = round(statistics.median(times), 4) or None
    row["tokens_per_s"] = round(statistics.median(speeds), 2)
    row["detail"] |= {
        "thoughts": len(shown.answers), "iterations": tree.last_iteration,
        "seconds": round(shown.seconds, 4), "steps_ms": plotted(shown.steps),
        "tpot_runs_ms": [round(time, 4) for time in times],
        "tokens_per_s_runs": [round(speed, 2) for speed in speeds],
    }  # fmt: skip


async def _replay(
    name: str,
    tree: ThoughtTree,
    model: Model,
    client: Client,
    ids: random.Random,
    clock: Callable[[], float],
) -> Replay:
    """One replay with token ids of its own: the server still holds the earlier replays' prefixes.

    Only the prompt is cached before.
    """
    prompt = draw(ids, model, tree.nodes[ROOT].tokens)
    marks = {node: draw(ids, model, MARK) for node in sorted(tree.nodes)}
    workload = Workload(name, "", (prompt,), thought_requests(tree, prompt, marks.__getitem__))
    starts = {thought_name(node): thought.start for node, thought in tree.nodes.items()}
    await client.batch([prompt], 1)
    began = clock()
    answers = await send_requests(workload, client)
    seconds = clock() - began
    return Replay([ThoughtAnswer(starts[answer.request], answer) for answer in answers], seconds)


def step_latencies(answers: Sequence[ThoughtAnswer]) -> dict[int, float]:
    """Seconds of each iteration: the median gap before the tokens that it decodes.

    A thought's first token has no gap, because a prefill precedes it.
    """
    gaps: dict[int, list[float]] = {}
    for answer in answers:
        for place, gap in enumerate(answer.answer.gaps, start=1):
            gaps.setdefault(answer.start + place, []).append(gap)
    return {iteration: statistics.median(found) for iteration, found in sorted(gaps.items())}


def plotted(steps: dict[int, float]) -> dict[str, list[float]]:
    """At most :data:`POINTS` points: mean iteration and mean milliseconds of neighbouring steps."""
    width = -(-len(steps) // POINTS) or 1
    items = list(steps.items())
    groups = [items[at : at + width] for at in range(0, len(items), width)]
    return {
        "iteration": [round(statistics.fmean(i for i, _ in group), 1) for group in groups],
        "ms": [round(statistics.fmean(s for _, s in group) * 1e3, 3) for group in groups],
    }

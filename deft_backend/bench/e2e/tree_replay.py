"""Recorded trees of thoughts through a server, with the latency of every decoding step.

A thought is a request of its recorded length. When it ends its children start: their prompts are
the tokens so far and two ids that tell siblings apart (greedy decoding would make them all alike).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deft_backend.bench.e2e.cases import draw
from deft_backend.bench.e2e.client import Client, Completion
from deft_backend.bench.e2e.measure import latencies
from deft_backend.bench.e2e.model import Model
from deft_backend.bench.e2e.rows import Row
from deft_backend.bench.traces import ROOT, ThoughtTree, TraceError, load_trace

MARK = 2
"""Token ids that tell a thought from its siblings."""

POINTS = 400
"""Steps of a tree are put together into at most so many points of its plot."""


@dataclass(frozen=True)
class Answered:
    """A thought's answer: its tokens were decoded in the tree's iterations from `start` on."""

    start: int
    completion: Completion


def recorded_trees(path: Path, scale: float = 1.0) -> list[tuple[str, ThoughtTree]]:
    """Of each file the tree with the most thoughts, named after the file and its index there.

    Parameters
    ----------
    path : Path
        A file of trees of thoughts, or a folder; token trees of speculative decoding in it are
        passed over, since servers decode one token a request.
    scale : float
        Factor on all lengths.

    Raises
    ------
    TraceError
        If there is none, or a file cannot be read.
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
    """Tokens of the longest request, prompt and answer."""
    return max(
        sum(tree.nodes[above].tokens + MARK for above in tree.path(node)) for node in tree.nodes
    )


async def replay_tree(name: str, tree: ThoughtTree, model: Model, client: Client, row: Row) -> None:
    """Replay a tree, its prompt cached before, and fill in the row.

    ``tpot_ms`` is the mean over the tree's iterations of the median gap of the thoughts that are
    decoded then, so that every step counts once, however many thoughts are alive.
    """
    import random

    ids = random.Random(name)
    prompt = draw(ids, model, tree.nodes[ROOT].tokens)
    marks = {node: draw(ids, model, MARK) for node in sorted(tree.nodes)}
    await client.batch([prompt], 1)
    began = time.perf_counter()
    answers = await _below(tree, ROOT, prompt, marks, client)
    seconds = time.perf_counter() - began
    completions = [answer.completion for answer in answers]
    tokens = sum(len(completion.ids) for completion in completions)
    latencies(completions, row)
    steps = step_latencies(answers)
    row["tpot_ms"] = round(statistics.fmean(steps.values()) * 1e3, 4) if steps else None
    row["tokens_per_s"] = round(tokens / seconds, 2)
    row["detail"] |= {
        "thoughts": len(completions), "iterations": tree.last_iteration,
        "seconds": round(seconds, 4), "steps_ms": plotted(steps),
    }  # fmt: skip


async def _below(
    tree: ThoughtTree,
    node: int,
    context: tuple[int, ...],
    marks: dict[int, tuple[int, ...]],
    client: Client,
) -> list[Answered]:
    """Answers of everything below a node, whose tokens end `context`."""

    async def think(child: int) -> list[Answered]:
        thought = tree.nodes[child]
        if not thought.tokens:
            return await _below(tree, child, context, marks, client)
        prompt = context + marks[child]
        completion = await client.stream(prompt, thought.tokens)
        below = await _below(tree, child, prompt + tuple(completion.ids), marks, client)
        return [Answered(thought.start, completion), *below]

    found = await asyncio.gather(*(think(child) for child in tree.nodes[node].children))
    return [answer for answers in found for answer in answers]


def step_latencies(answers: Sequence[Answered]) -> dict[int, float]:
    """Seconds of each iteration: the median gap before the tokens that it decodes.

    A thought's first token has no gap: what comes before it is a prefill.
    """
    gaps: dict[int, list[float]] = {}
    for answer in answers:
        for place, gap in enumerate(answer.completion.gaps, start=1):
            gaps.setdefault(answer.start + place, []).append(gap)
    return {iteration: statistics.median(found) for iteration, found in sorted(gaps.items())}


def plotted(steps: dict[int, float]) -> dict[str, list[float]]:
    """At most :data:`POINTS` points: mean iteration and mean milliseconds of neighbours."""
    width = -(-len(steps) // POINTS) or 1
    items = list(steps.items())
    groups = [items[at : at + width] for at in range(0, len(items), width)]
    return {
        "iteration": [round(statistics.fmean(i for i, _ in group), 1) for group in groups],
        "ms": [round(statistics.fmean(s for _, s in group) * 1e3, 3) for group in groups],
    }

"""The papers' workloads: recorded trees, prompts of other lengths, and other widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.kernel.tree_workloads import TRACES, Workload, described
from benchmarks.recorded_traces import TokenTree, decoding, forest_at, load_trace, token_tree_forest
from deft_backend.forest import PrefixForest
from deft_backend.tools.traces.arrivals import TraceError
from deft_backend.tools.traces.thought_trees import ROOT, ThoughtTree, lay_out

THOUGHTS = ("sorting128ToT", "docmergeToT", "keywordToT", "set128ToT")
"""DeFT's multi-step reasoning tasks: sorting, document, keyword, set (Table 13)."""

TOKEN_TREES = tuple(f"APPS_tree_size{size}" for size in (32, 64, 128, 256))
"""DeFT's speculative decoding: token trees of t candidates (Table 13)."""

FEW_SHOT = (20, 30, 50)
"""DeFT's few-shot prompting: b branches on a prompt of 4,000 tokens (Table 13)."""

PROMPT_TOKENS = 4000
OWN_TOKENS = 400
"""Tokens that each branch of a few-shot prompt decodes."""

SAMPLES = 8
"""Evenly spaced steps that stand for the steps of a recording."""


def few_shot(branches: Sequence[int]) -> list[Workload]:
    """A prompt with `branches` continuations, halfway through the tokens that they decode."""
    trees = {width: f"1,{width} {PROMPT_TOKENS},{OWN_TOKENS // 2}" for width in branches}
    return [
        replace(described(tree), set=f"b={width}", page_size=16) for width, tree in trees.items()
    ]


def few_shot_steps(width: int) -> Iterator[PrefixForest]:
    """The forest of each decode step of a few-shot prompt."""
    for own in range(1, OWN_TOKENS + 1):
        yield described(f"1,{width} {PROMPT_TOKENS},{own}").forest


def recorded(path: Path, steps: int) -> list[Workload]:
    """Evenly spaced steps of one tree of each recording: of a file, or of each file of a folder.

    Raises TraceError if there is no trace, or a file is not a trace.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"there is no .json file in {path}; expected DeFT's recorded trees there")
    return [replace(each, set=TRACES) for file in files for each in _steps(file, steps)]


def thoughts(
    traces: Path, samples: int = SAMPLES, names: Sequence[str] = THOUGHTS, prompt: int | None = None
) -> list[Workload]:
    """Steps of the recorded trees of thoughts; `prompt` replaces the length of the prompt."""
    return [each for name in names for each in _steps(traces / f"{name}.json", samples, prompt)]


def token_trees(traces: Path, samples: int = SAMPLES) -> list[Workload]:
    """Steps of the recorded token trees, one query a candidate token."""
    return [each for name in TOKEN_TREES for each in _steps(traces / f"{name}.json", samples)]


def _steps(path: Path, count: int, prompt: int | None = None) -> list[Workload]:
    """Steps of the recording with most tokens, or of the tree with most thoughts."""
    content, label = load_trace(path), path.stem
    describe: Callable[[int], PrefixForest]
    if isinstance(content, TokenTree):
        accepted = content.accepted
        record = max(range(len(accepted)), key=lambda r: (sum(accepted[r]), -r))
        describe = partial(token_tree_forest, content, record)
        steps = spread(0, len(accepted[record]) - 1, count)
    else:
        tree = max(content, key=lambda tree: (len(tree.nodes), tree.last_iteration))
        if not tree.nodes:
            raise TraceError(f"{path}: every tree was recorded as incomplete and holds no nodes")
        if prompt is not None:
            tree, label = with_prompt(tree, prompt), f"{label}, prompt {prompt}"
        describe, steps = partial(forest_at, tree), spread(1, tree.last_iteration, count)
    return [Workload(label, f"{label}@{at}", partial(describe, at)) for at in steps]


def spread(first: int, last: int, count: int) -> list[int]:
    """The middles of `count` equal parts of ``first … last``, as whole numbers without repeats.

    >>> spread(1, 8, 4)
    [2, 4, 6, 8]
    """
    span = last - first + 1
    return sorted({first + (2 * i + 1) * span // (2 * count) for i in range(count)})


def drafted(workloads: Sequence[Workload], tokens: int) -> list[Workload]:
    """The same steps with a binary draft tree of `tokens` query tokens behind each thought."""
    parents = tuple((at - 1) // 2 for at in range(tokens))
    return [
        replace(
            each,
            describe=partial(_with_drafts, each.describe, tokens),
            query_tokens=tokens,
            parents=parents,
        )
        for each in workloads
    ]


def _with_drafts(describe: Callable[[], PrefixForest], tokens: int) -> PrefixForest:
    forest = describe()
    length = forest.length + np.int32(tokens) * forest.is_leaf
    return replace(forest, length=length, seq_lens=forest.seq_lens + np.int32(tokens))


def prompts(lengths: Sequence[int], trees: Sequence[int]) -> list[Workload]:
    """Token trees of one-token candidates behind prompts of `lengths` tokens."""
    return [
        replace(described(f"1,{size} {length},1"), set=f"t={size}, prompt {length}")
        for size in trees
        for length in lengths
    ]


def with_prompt(tree: ThoughtTree, tokens: int) -> ThoughtTree:
    """The same tree behind a prompt of another length (DeFT, Table 7)."""
    lengths = {node.id: node.tokens for node in tree.nodes.values()} | {ROOT: tokens}
    children = {node.id: node.children for node in tree.nodes.values()}
    return replace(tree, nodes=lay_out(lengths, children))


def every_step(path: Path) -> Iterator[PrefixForest]:
    """The forest of each decode step of each recording of a file."""
    content = load_trace(path)
    if isinstance(content, TokenTree):
        for record, accepted in enumerate(content.accepted):
            for step in range(len(accepted)):
                yield token_tree_forest(content, record, step)
        return
    for tree in content:
        for iteration in range(1, tree.last_iteration + 1):
            if decoding(tree, iteration):
                yield forest_at(tree, iteration)

"""The papers' workloads: recorded trees, prompts of other lengths, and other widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.kernel.recorded_workloads import spread
from benchmarks.kernel.tree_workloads import Workload, described
from deft_backend.forest import PrefixForest
from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree, TokenTree, lay_out
from deft_backend.tools.traces.trace_files import load_trace
from deft_backend.tools.traces.tree_forests import forest_at, token_tree_forest

THOUGHTS = ("sorting128ToT", "docmergeToT", "keywordToT", "set128ToT")
"""DeFT's multi-step reasoning tasks: sorting, document, keyword, set (Table 13)."""

TOKEN_TREES = tuple(f"APPS_tree_size{size}" for size in (32, 64, 128, 256))
"""DeFT's speculative decoding: token trees of t candidates (Table 13)."""

FEW_SHOT = (20, 30, 50)
"""DeFT's few-shot prompting: b branches on a prompt of 4,000 tokens (Table 13)."""

PROMPT_TOKENS = 4000
OWN_TOKENS = 200
"""Tokens of a branch halfway through the 400 that few-shot prompting decodes."""

SAMPLES = 8
"""Evenly spaced steps that stand for the steps of a recording."""


def few_shot(branches: Sequence[int] = FEW_SHOT, own: int = OWN_TOKENS) -> list[Workload]:
    """A prompt with `branches` continuations of `own` tokens each."""
    return [
        replace(described(f"1,{width} {PROMPT_TOKENS},{own}"), set=f"b={width}", page_size=16)
        for width in branches
    ]


def thoughts(
    traces: Path, samples: int = SAMPLES, names: Sequence[str] = THOUGHTS, prompt: int | None = None
) -> list[Workload]:
    """Steps of the recorded trees of thoughts; `prompt` replaces the length of the prompt."""
    made = []
    for name in names:
        tree = _tree(traces / f"{name}.json")
        if prompt is not None:
            tree = with_prompt(tree, prompt)
        label = name if prompt is None else f"{name}, prompt {prompt}"
        made += [
            Workload(label, f"{label}@{at}", partial(forest_at, tree, at))
            for at in spread(1, tree.last_iteration, samples)
        ]
    return made


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


def token_trees(traces: Path, samples: int = SAMPLES) -> list[Workload]:
    """Steps of the recorded token trees, one query a candidate token."""
    made = []
    for name in TOKEN_TREES:
        tree = load_trace(traces / f"{name}.json")
        assert isinstance(tree, TokenTree)
        record = max(range(len(tree.accepted)), key=lambda r: (sum(tree.accepted[r]), -r))
        made += [
            Workload(name, f"{name}@{step}", partial(token_tree_forest, tree, record, step))
            for step in spread(0, len(tree.accepted[record]) - 1, samples)
        ]
    return made


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
            if tree.live(iteration):
                yield forest_at(tree, iteration)


@cache
def _tree(path: Path) -> ThoughtTree:
    """The recording with most thoughts."""
    content = load_trace(path)
    assert isinstance(content, list)
    return max(content, key=lambda tree: (len(tree.nodes), tree.last_iteration))

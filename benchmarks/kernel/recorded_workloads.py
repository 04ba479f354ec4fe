"""Steps of DeFT's recorded trees as workloads: trees of thoughts and Medusa token trees."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.kernel.tree_workloads import TRACES, Workload
from deft_backend.tools.traces.recorded_trees import ThoughtTree, TokenTree, TraceError
from deft_backend.tools.traces.trace_files import load_trace
from deft_backend.tools.traces.tree_forests import forest_at, token_tree_forest


def recorded_workloads(path: Path, steps: int) -> list[Workload]:
    """Evenly spaced steps of one tree of each recording, one workload per step.

    - `path`: a trace file, or a folder of them. Each file gives its tree with the most thoughts, or
      its recording with the most tokens.
    - `steps`: number of steps of each tree.

    Raises TraceError if there is no trace, or a file is not a trace.
    """
    if path.is_dir():
        found = sorted(path.glob("*.json"))
        if not found:
            raise TraceError(
                f"there is no .json file in {path}; expected DeFT's recorded trees there"
            )
    else:
        found = [path]
    return [workload for file in found for workload in _of_file(file, steps)]


def _of_file(path: Path, steps: int) -> list[Workload]:
    content = load_trace(path)
    if isinstance(content, TokenTree):
        return _token_steps(path.stem, content, steps)
    return _thought_steps(path, content, steps)


def _token_steps(name: str, tree: TokenTree, steps: int) -> list[Workload]:
    record = max(range(len(tree.accepted)), key=lambda r: (sum(tree.accepted[r]), -r))
    return [
        Workload(TRACES, f"{name}[{record}]@{step}", partial(token_tree_forest, tree, record, step))
        for step in spread(0, len(tree.accepted[record]) - 1, steps)
    ]


def _thought_steps(path: Path, trees: list[ThoughtTree], steps: int) -> list[Workload]:
    if not any(tree.nodes for tree in trees):
        raise TraceError(f"{path}: every tree was recorded as incomplete and holds no nodes")
    index = max(range(len(trees)), key=lambda i: (len(trees[i].nodes), trees[i].last_iteration, -i))
    tree = trees[index]
    return [
        Workload(TRACES, f"{path.stem}[{index}]@{at}", partial(forest_at, tree, at))
        for at in spread(1, tree.last_iteration, steps)
    ]


def spread(first: int, last: int, count: int) -> list[int]:
    """The middles of `count` equal parts of ``first … last``, as whole numbers without repeats.

    >>> spread(1, 8, 4)
    [2, 4, 6, 8]
    """
    span = last - first + 1
    return sorted({first + (2 * i + 1) * span // (2 * count) for i in range(count)})

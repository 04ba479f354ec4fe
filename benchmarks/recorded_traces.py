"""DeFT's recorded trees, of thoughts and of Medusa's tokens: their files, and their forests.

A file of trees of thoughts is a list of ``{"incompleted", "prompt", "data"}``. Here ``data`` maps
an id to ``{"id", "value", "start", "end", "children"}``. Node 0 is the prompt (``value`` tokens
ending at iteration 0). Every other node is a thought. Its tokens were decoded at iterations
``start`` to ``end``, counted from the end of the prompt. When a thought ends its children start; a
thought without children was pruned or is an answer. Source: DeFT, appendix A.6.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.row_files import read_json
from deft_backend.files.json_fields import LARGEST, FieldError, shown, whole, within
from deft_backend.forest import PrefixForest, forest_from_paths
from deft_backend.tools.traces.arrivals import TraceError
from deft_backend.tools.traces.thought_trees import ROOT, Thought, ThoughtTree

T = TypeVar("T")

CHARACTERS_A_TOKEN = 4  # estimate for prompts that a token-tree recording holds as text only


@dataclass(frozen=True)
class TokenTree:
    """A Medusa token tree and the tokens that each step of a recording accepted.

    ``paths`` hold, for each candidate token, the choices from the root to it. The root is the last
    accepted token. A candidate's parent has the same path without the last choice.
    """

    paths: tuple[tuple[int, ...], ...]
    prompts: tuple[str, ...]
    accepted: tuple[tuple[int, ...], ...]

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each query token. Token 0 is the last accepted one, with parent -1.

        >>> TokenTree(((0,), (1,), (0, 0)), (), ()).parents
        (-1, 0, 0, 1)
        """
        number = {(): 0, **{path: i + 1 for i, path in enumerate(self.paths)}}
        return (-1, *(number[path[:-1]] for path in self.paths))


def load_thought_trees(path: Path) -> list[ThoughtTree]:
    """Read a file of trees of thoughts; raises TraceError, which names the tree and field."""
    content = read_json(path, TraceError, "the trace ")
    if not isinstance(content, list) or not content:
        raise TraceError(
            f"{path}: expected a list of at least one tree, each with incompleted, prompt and "
            f"data; got {shown(content)}"
        )
    trees = []
    with _named(path):
        for index, tree in enumerate(content):
            with within(f"tree {index}"):
                trees.append(_thought_tree(tree))
    return trees


def load_token_tree(path: Path) -> TokenTree:
    """Read a Medusa token tree file (``Tree_Structure`` and ``Records``); raises TraceError."""
    content = read_json(path, TraceError, "the trace ")
    paths: list[tuple[int, ...]] = []
    prompts: list[str] = []
    accepted: list[tuple[int, ...]] = []
    with _named(path):
        for index, choices in enumerate(_get(content, "Tree_Structure", list)):
            with within(f"Tree_Structure[{index}]"):
                paths.append(_whole_numbers({"it": choices}, "it"))
        for index, record in enumerate(_get(content, "Records", list)):
            with within(f"record {index}"):
                prompts.append(_get(record, "prompt", str))
                accepted.append(_whole_numbers(record, "Accept_length"))
    return TokenTree(tuple(paths), tuple(prompts), tuple(accepted))


def load_trace(path: Path) -> list[ThoughtTree] | TokenTree:
    content = read_json(path, TraceError, "the trace ")
    return load_token_tree(path) if isinstance(content, dict) else load_thought_trees(path)


def _thought_tree(tree: Any) -> ThoughtTree:
    nodes: dict[int, Thought] = {}
    for key, record in _get(tree, "data", dict).items():
        with within(f"node {key}"):
            names = ("id", "value", "start", "end")
            id, tokens, start, end = (whole(record, name, -LARGEST) for name in names)
            nodes[id] = Thought(id, tokens, start, end, _whole_numbers(record, "children", 1))
    return ThoughtTree(_get(tree, "prompt", str), nodes)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from error


def _get(record: Any, name: str, kind: type[T]) -> T:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise FieldError(f"{name} is {shown(value)}; expected {kind.__name__}")
    return value


def _whole_numbers(record: Any, name: str, least: int = 0) -> tuple[int, ...]:
    return tuple(whole({name: value}, name, least) for value in _get(record, name, list))


def decoding(tree: ThoughtTree, iteration: int) -> list[Thought]:
    """The thoughts that decode at an iteration, depth first."""
    found: list[Thought] = []
    stack = [ROOT] if tree.nodes else []
    while stack:
        node = tree.nodes[stack.pop()]
        if node.tokens and node.start <= iteration <= node.end:
            found.append(node)
        stack.extend(reversed(node.children))
    return found


def forest_at(tree: ThoughtTree, iteration: int) -> PrefixForest:
    """The forest of the step in which the tree decodes token number `iteration`. Every thought that
    decodes in this step is a query. Its own tokens include this iteration's, whose key and value
    the server writes before. Iteration 0 is the prompt's last token.
    """
    live = decoding(tree, iteration)
    if not live or iteration < 0:
        raise TraceError(
            f"nothing is decoded at iteration {iteration}; expected 0 to {tree.last_iteration}"
        )
    parent = {child: node for node in tree.nodes.values() for child in node.children}
    paths: list[list[tuple[Hashable, int]]] = []
    lengths: list[int] = []
    for thought in live:
        above: list[Thought] = []
        node = thought
        while node.id != ROOT:
            node = parent[node.id]
            above.insert(0, node)
        paths.append([(node.id, node.tokens) for node in above if node.tokens])
        lengths.append(sum(node.tokens for node in above) + iteration - thought.start + 1)
    return forest_from_paths(paths, lengths)


def token_tree_forest(tree: TokenTree, record: int, step: int) -> PrefixForest:
    """The forest of a recording's step: each candidate is a query and a node of one token."""
    if not 0 <= record < len(tree.accepted):
        raise TraceError(f"there is no record {record}; expected 0 to {len(tree.accepted) - 1}")
    accepted = tree.accepted[record]
    if not 0 <= step < len(accepted):
        raise TraceError(f"nothing is decoded at step {step}; expected 0 to {len(accepted) - 1}")
    prompt = max(1, len(tree.prompts[record]) // CHARACTERS_A_TOKEN)
    context = prompt + sum(accepted[:step]) + 1
    paths: list[list[tuple[Hashable, int]]] = [[(ROOT, context)]]
    for path in tree.paths:
        choices = [(path[:depth], 1) for depth in range(1, len(path) + 1)]
        paths.append([(ROOT, context), *choices])
    return forest_from_paths(paths, [context, *(context + len(path) for path in tree.paths)])

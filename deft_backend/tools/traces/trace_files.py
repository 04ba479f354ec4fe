"""Read and check DeFT's recorded trees: trees of thoughts and Medusa token trees.

A file of trees of thoughts is a list of ``{"incompleted", "prompt", "data"}``. Here ``data`` maps
an id to ``{"id", "value", "start", "end", "children"}``. Node 0 is the prompt (``value`` tokens
ending at iteration 0). Every other node is a thought. Its tokens were decoded at iterations
``start`` to ``end``, counted from the end of the prompt. When a thought ends its children start; a
thought without children was pruned or is an answer. Source: DeFT, appendix A.6.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deft_backend.files.json_fields import read_json, shown
from deft_backend.tools.traces.arrivals import is_arrival_trace
from deft_backend.tools.traces.recorded_trees import (
    ROOT,
    Thought,
    ThoughtTree,
    TokenTree,
    TraceError,
)


def load_thought_trees(path: Path) -> list[ThoughtTree]:
    """Read a file of trees of thoughts.

    Raises TraceError if the file cannot be read, or its trees are impossible. The message names the
    file, the tree's index, the node, the field, its value and the expected value.
    """
    content = read_json(path, TraceError, "the trace ")
    if not isinstance(content, list):
        raise TraceError(
            f"{path}: expected a list of trees, each with incompleted, prompt and data; "
            f"got {_kind(content)}"
        )
    if not content:
        raise TraceError(f"{path} holds no tree; expected a list of at least one")
    return [_thought_tree(tree, f"{path}: tree {index}") for index, tree in enumerate(content)]


def load_token_tree(path: Path) -> TokenTree:
    """Read a Medusa token tree file (``Tree_Structure`` and ``Records``).

    Raises TraceError: as in :func:`load_thought_trees`.
    """
    content = read_json(path, TraceError, "the trace ")
    where = str(path)
    if not isinstance(content, dict):
        raise TraceError(f"{where}: expected an object with Tree_Structure and Records")
    paths: list[tuple[int, ...]] = []
    for index, choices in enumerate(_get(content, "Tree_Structure", list, where)):
        at = f"{where}: Tree_Structure[{index}]"
        if not isinstance(choices, list) or not choices:
            raise TraceError(f"{at} is {shown(choices)}; expected a list of choices, at least one")
        path_of_choices = tuple(_integer(choice, at, least=0) for choice in choices)
        if path_of_choices in paths or (
            len(path_of_choices) > 1 and path_of_choices[:-1] not in paths
        ):
            raise TraceError(
                f"{at} is {shown(choices)}; expected a new path whose parent came before"
            )
        paths.append(path_of_choices)
    prompts: list[str] = []
    accepted: list[tuple[int, ...]] = []
    for index, record in enumerate(_get(content, "Records", list, where)):
        at = f"{where}: record {index}"
        if not isinstance(record, dict):
            raise TraceError(f"{at} is {_kind(record)}; expected an object")
        prompts.append(_get(record, "prompt", str, at))
        lengths = _get(record, "Accept_length", list, at)
        accepted.append(tuple(_integer(n, f"{at}: Accept_length", least=0) for n in lengths))
    return TokenTree(tuple(paths), tuple(prompts), tuple(accepted))


def load_trace(path: Path) -> list[ThoughtTree] | TokenTree:
    """Read either kind of file."""
    if is_arrival_trace(path):
        raise TraceError(f"{path} holds arrivals, which 'deft ab --trace' replays; expected trees")
    content = read_json(path, TraceError, "the trace ")
    return load_token_tree(path) if isinstance(content, dict) else load_thought_trees(path)


def _thought_tree(tree: Any, where: str) -> ThoughtTree:
    if not isinstance(tree, dict):
        raise TraceError(f"{where} is {_kind(tree)}; expected an object")
    incomplete = _get(tree, "incompleted", bool, where)
    prompt = _get(tree, "prompt", str, where)
    data = _get(tree, "data", dict, where)
    nodes: dict[int, Thought] = {}
    for key, record in data.items():
        node = _thought(key, record, f"{where}, node {key}")
        nodes[node.id] = node
    if not nodes and not incomplete:
        raise TraceError(f"{where}: data is empty, but incompleted is false; expected node 0")
    if nodes:
        _check_shape(nodes, where)
    return ThoughtTree(prompt, incomplete, nodes)


def _thought(key: str, record: Any, where: str) -> Thought:
    if not isinstance(record, dict):
        raise TraceError(f"{where} is {_kind(record)}; expected an object")
    fields = {
        name: _integer(_get(record, name, int, where), f"{where}: {name}")
        for name in ("id", "value", "start", "end")
    }
    children = _get(record, "children", list, where)
    node = Thought(
        fields["id"],
        fields["value"],
        fields["start"],
        fields["end"],
        tuple(_integer(child, f"{where}: children", least=1) for child in children),
    )
    if str(node.id) != key:
        raise TraceError(f"{where}: id is {node.id}; expected {key}, the key it is stored under")
    if node.tokens != node.end - node.start + 1 or node.tokens < 0:
        raise TraceError(
            f"{where}: value is {node.tokens}, but start {node.start} to end {node.end} are "
            f"{node.end - node.start + 1} iterations; expected one token an iteration"
        )
    return node


def _check_shape(nodes: Mapping[int, Thought], where: str) -> None:
    root = nodes.get(ROOT)
    if root is None:
        raise TraceError(f"{where}: there is no node 0; expected the prompt")
    if root.end != 0 or root.tokens < 1:
        raise TraceError(
            f"{where}, node 0: end is {root.end} and value {root.tokens}; expected a prompt of at "
            "least one token that ends at iteration 0"
        )
    seen: dict[int, int] = {}
    for node in nodes.values():
        at = f"{where}, node {node.id}: children"
        for child in node.children:
            if child not in nodes:
                raise TraceError(f"{at} holds {child}, which is not a node of this tree")
            if child in seen:
                raise TraceError(f"{at} holds {child}, which is a child of node {seen[child]} too")
            seen[child] = node.id
            if nodes[child].start != node.end + 1:
                raise TraceError(
                    f"{where}, node {child}: start is {nodes[child].start}; expected "
                    f"{node.end + 1}, right after the end of its parent, node {node.id}"
                )
    reached, stack = {ROOT}, [ROOT]
    while stack:
        below = nodes[stack.pop()].children
        reached.update(below)
        stack.extend(below)
    if lost := sorted(set(nodes) - reached):
        raise TraceError(f"{where}, node {lost[0]}: is in nobody's children; expected a parent")


def _get(record: dict[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in record:
        raise TraceError(f"{where}: {name} is missing; there is {', '.join(record) or 'nothing'}")
    if not isinstance(record[name], kind):
        raise TraceError(f"{where}: {name} is {_kind(record[name])}; expected {kind.__name__}")
    return record[name]


def _integer(value: Any, where: str, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (least or value) > value:
        at_least = "" if least is None else f" of at least {least}"
        raise TraceError(f"{where} holds {shown(value)}; expected an integer{at_least}")
    return value


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {shown(value)}"

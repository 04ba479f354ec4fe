"""Read and check DeFT's recorded trees: trees of thoughts and Medusa token trees.

A file of trees of thoughts is a list of ``{"incompleted", "prompt", "data"}``. Here ``data`` maps
an id to ``{"id", "value", "start", "end", "children"}``. Node 0 is the prompt (``value`` tokens
ending at iteration 0). Every other node is a thought. Its tokens were decoded at iterations
``start`` to ``end``, counted from the end of the prompt. When a thought ends its children start; a
thought without children was pruned or is an answer. Source: DeFT, appendix A.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from deft_backend.files.json_fields import (
    LARGEST,
    FieldError,
    number,
    read_json,
    shown,
    whole,
    within,
)
from deft_backend.files.private_files import parsed
from deft_backend.tools.traces.recorded_trees import (
    Thought,
    ThoughtTree,
    TokenTree,
    TraceError,
)

T = TypeVar("T")


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
    return ThoughtTree(_get(tree, "prompt", str), _get(tree, "incompleted", bool), nodes)


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


BLOCK_TOKENS = 512  # tokens that one hash id stands for

LATEST_MS = 1e15  # largest timestamp: some thirty thousand years


@dataclass(frozen=True)
class Arrival:
    timestamp: float  # milliseconds from the trace's origin
    # Tokens of the prompt and of the answer.
    input_length: int
    output_length: int
    # One for each block of the prompt. A last block of fewer tokens may lack its id.
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS  # tokens of a full block; 512, unless the trace is scaled

    def scaled(self, scale: float) -> Arrival:
        """The same sharing, with every length multiplied by `scale`, and at least one token."""
        if scale == 1.0:
            return self
        block = max(1, round(self.block_tokens * scale))
        full, rest = divmod(self.input_length, self.block_tokens)
        tokens = full * block + min(block, math.ceil(rest * block / self.block_tokens))
        answer = max(1, round(self.output_length * scale))
        return replace(self, input_length=tokens, output_length=answer, block_tokens=block)


def load_arrivals(path: Path) -> list[Arrival]:
    """The requests of a trace, sorted by time; raises TraceError, which names line and field."""
    try:
        with path.open(encoding="utf-8") as lines:
            arrivals = [
                _arrival(line, f"{path}, line {at}")
                for at, line in enumerate(lines, 1)
                if line.strip()
            ]
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"cannot read the trace {path}: it is not UTF-8 ({error})") from error
    if not arrivals:
        raise TraceError(f"{path} holds no request; expected one JSON object a line")
    return sorted(arrivals, key=lambda arrival: arrival.timestamp)


def shared_tokens(arrivals: Sequence[Arrival]) -> int:
    seen: set[int] = set()
    total = 0
    for arrival in arrivals:
        left = arrival.input_length
        for id in arrival.hash_ids:
            tokens = min(left, arrival.block_tokens)
            total += tokens if id in seen else 0
            left -= tokens
            seen.add(id)
    return total


def _arrival(line: str, where: str) -> Arrival:
    try:
        content = parsed(line)
    except ValueError as error:
        raise TraceError(f"{where}: expected a JSON object; {error}") from error
    try:
        if not isinstance(content, dict):
            raise FieldError(f"it is {shown(content)}; expected a JSON object")
        timestamp = number(content, "timestamp")
        if not 0 <= timestamp <= LATEST_MS:
            raise FieldError(f"timestamp is {timestamp:g}; expected milliseconds, at least 0")
        tokens = whole(content, "input_length", 1)
        # Recorded answers can be empty; a server decodes at least one token.
        answer = max(1, whole(content, "output_length"))
        ids = content.get("hash_ids")
        if not isinstance(ids, list):
            raise FieldError(f"hash_ids is {shown(ids)}; expected a list of whole numbers")
        hash_ids = tuple(whole({"hash_ids": id}, "hash_ids", -LARGEST) for id in ids)
        least, most = tokens // BLOCK_TOKENS, -(-tokens // BLOCK_TOKENS)
        if not least <= len(hash_ids) <= most:
            expected = f"{most}" if least == most else f"{least} or {most}"
            raise FieldError(
                f"hash_ids holds {len(hash_ids)} ids for input_length {tokens}; expected "
                f"{expected}, one for each {BLOCK_TOKENS} tokens"
            )
    except ValueError as error:
        raise TraceError(f"{where}: {error}") from error
    return Arrival(timestamp, tokens, answer, hash_ids)

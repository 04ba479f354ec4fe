"""Traces of arrivals in Mooncake's format: when a request came, how long it was, what it shared.

A file has one JSON object a line: ``{"timestamp": 27482, "input_length": 6955, "output_length": 52,
"hash_ids": [46, 47, ...]}``. The timestamp is in milliseconds. Each id stands for the next 512
tokens of the prompt and for all text before them. So equal ids at the start mean an equal prefix.
The last id may stand for fewer tokens. Source: https://github.com/kvcache-ai/Mooncake
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from deft_backend.files.json_fields import LARGEST, FieldError, number, shown, whole
from deft_backend.files.private_files import parsed
from deft_backend.tools.traces.recorded_trees import TraceError

BLOCK_TOKENS = 512  # tokens that one hash id stands for

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

LATEST_MS = 1e15  # largest timestamp: some thirty thousand years


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

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


def is_arrival_trace(path: Path) -> bool:
    """Whether a file holds arrivals, one object a line, and not DeFT's list of trees."""
    first = ""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    return path.suffix == ".jsonl" or (
        first.lstrip().startswith("{") and any(f'"{name}"' in first for name in FIELDS)
    )


def load_arrivals(path: Path) -> list[Arrival]:
    """The requests of a trace, sorted by time.

    Raises TraceError if the file cannot be read, is empty or has a wrong line. The message names
    the line, the field, its value and the expected value.
    """
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


def dump_arrivals(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """The lines of a file that :func:`load_arrivals` reads."""
    for arrival in arrivals:
        values = (
            round(arrival.timestamp), arrival.input_length, arrival.output_length,
            list(arrival.hash_ids),
        )  # fmt: skip
        yield json.dumps(dict(zip(FIELDS, values, strict=True)))


def shared_tokens(arrivals: Sequence[Arrival]) -> int:
    """Prompt tokens that an earlier request of the trace already had."""
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

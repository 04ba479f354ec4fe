"""Traces of arrivals in Mooncake's format: when requests came, and which blocks they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deft_backend.files.json_fields import LARGEST, FieldError, number, shown, whole
from deft_backend.files.private_files import parsed
from deft_backend.tools.traces.invented import MOST_TOKENS

BLOCK_TOKENS = 512  # tokens that one hash id stands for

LATEST_MS = 1e15  # largest timestamp: some thirty thousand years


class TraceError(ValueError):
    """The trace is wrong; the message names the file, the place in it and the field."""


@dataclass(frozen=True)
class Arrival:
    timestamp: float  # milliseconds from the trace's origin
    # Tokens of the prompt and of the answer.
    input_length: int
    output_length: int
    # One for each block of the prompt. A last block of fewer tokens may lack its id.
    hash_ids: tuple[int, ...]


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
            tokens = min(left, BLOCK_TOKENS)
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
        tokens = whole(content, "input_length", 1, MOST_TOKENS)
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

"""Options of a host's server as arguments of its engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def engine_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """A server's options as arguments of the host's engine: ``--page-size 64`` is page_size=64.

    An option without a value is True, one with several values is a list. Values in JSON are read.

    Raises
    ------
    ValueError
        If a value stands before the first option.
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, assigned, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [_read(value)] if assigned else []
        elif name:
            found[name].append(_read(word))
        else:
            raise ValueError(f"expected an option such as --page-size 64, got {word!r}")
    return {
        name: True if not values else values[0] if len(values) == 1 else values
        for name, values in found.items()
    }


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value

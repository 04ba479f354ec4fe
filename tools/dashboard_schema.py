"""Check the dashboard against Grafana's published schema, as its Foundation SDK holds it.

The SDK's classes are generated from the schema. Fields that the schema lacks do not survive a
reading, nor do values of another form.
usage: python tools/dashboard_schema.py FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lost(given: Any, read: Any, place: str = "") -> Iterator[str]:
    """Where `read` lacks something of `given`, or differs."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            if name in read:
                yield from lost(value, read[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}: no such field"
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for at, pair in enumerate(zip(given, read, strict=True)):
            yield from lost(*pair, f"{place}[{at}]")
    elif given != read:
        yield f"{place}: {given!r} is read as {read!r}"


def main(path: str) -> int:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    given = json.loads(Path(path).read_text())
    found = list(lost(given, json.loads(JSONEncoder().encode(Dashboard.from_json(given)))))
    for line in found:
        print(f"{path}: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The README's line about architectures, from the rows of the zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.zoo.architectures import ARCHITECTURES

Row = Mapping[str, Any]


def passed(row: Row) -> bool:
    """Whether tree attention's tokens were checked, and none was wrong."""
    return "backend" not in row and bool(row["tokens_checked"] and not row["tokens_wrong"])


def readme_line(rows: Sequence[Row]) -> str:
    """The line of the README's table: architectures whose full layers tree attention decodes.

    An architecture counts if every row that checked tokens passed. An architecture stands in the
    second column if the host decodes all of its layers.
    """
    failed = {row["architecture"] for row in rows if row["tokens_wrong"] and "backend" not in row}
    good = [row for row in rows if passed(row) and row["architecture"] not in failed]
    tree = {row["architecture"] for row in good if row["layers_tree"]}
    host = {row["architecture"] for row in good} - tree
    return f"| architectures checked | {_titles(tree)} | {_titles(host) or '–'} |"


def _titles(names: set[str]) -> str:
    return ", ".join(sorted(ARCHITECTURES[name].title for name in names))

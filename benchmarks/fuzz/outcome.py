"""A failing seed."""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """A seed that fails.

    - `planner`: ``device``, or the policy of the reference.
    - `why`: in words.
    """

    seed: int
    planner: str
    why: str

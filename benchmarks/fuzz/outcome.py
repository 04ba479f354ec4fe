"""A failing seed."""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """A seed that fails.

    Attributes
    ----------
    seed : int
    planner : str
        ``device``, or the policy of the reference.
    why : str
        In words.
    """

    seed: int
    planner: str
    why: str

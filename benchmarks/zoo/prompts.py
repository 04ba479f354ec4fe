"""The requests of the zoo: one tree of two levels, an equal prompt, and one that shares nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Requests:
    """Requests to one server: `first` fills the prefix cache, and then `batch` decodes at once."""

    first: Prompt
    batch: tuple[Prompt, ...]
    tokens: int


def requests(ids: int, prefix: int, branch: int, leaves: int, tokens: int) -> Requests:
    """Two branches of a prefix, each with `leaves` prompts.

    Parameters
    ----------
    ids : int
        Prompts use token ids below this one.
    prefix, branch : int
        Tokens of the common prefix, and of each branch.
    leaves, tokens : int
        Prompts of a branch; tokens of an answer.
    """
    choose = random.Random(ids)

    def draw(count: int) -> Prompt:
        return tuple(choose.randrange(8, ids) for _ in range(count))

    root = draw(prefix)
    branches = [root + draw(branch) for _ in range(2)]
    prompts = [way + draw(choose.randint(1, 12)) for way in branches for _ in range(leaves)]
    return Requests(root, (*prompts, prompts[0], draw(prefix // 2)), tokens)

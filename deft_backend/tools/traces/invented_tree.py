"""Makes trees of thoughts in DeFT's format, so that a replay needs no recorded file."""

import random
from dataclasses import dataclass

from deft_backend.tools.traces.invented_text import passage
from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree, lay_out


@dataclass(frozen=True)
class ThoughtTreeShape:
    """The shape of a breadth-first search that keeps the best thoughts of every level."""

    depth: int = 3  # Levels of thoughts
    width: int = 4  # Thoughts proposed below each kept thought
    keep: int = 1  # Thoughts of a level that the search expands; it prunes the others when they end
    prompt_tokens: int = 400  # tokens of the prompt
    # Least and most tokens of a thought; all lengths in between are equally likely.
    shortest: int = 8
    longest: int = 24
    # Characters of a token, so that the prompt's text has about `prompt_tokens` tokens; 1 for
    # byte-level tokenizers.
    characters_a_token: float = 1.0


def generate_thought_tree(shape: ThoughtTreeShape, seed: int = 0) -> ThoughtTree:
    """A tree of thoughts of this shape; the same seed gives the same tree everywhere."""
    chance = random.Random(seed)
    lengths = {ROOT: shape.prompt_tokens}
    children: dict[int, list[int]] = {ROOT: []}
    kept = [ROOT]
    for _ in range(shape.depth):
        proposed: list[int] = []
        for parent in kept:
            for _ in range(shape.width):
                node = len(lengths)
                lengths[node] = chance.randint(shape.shortest, shape.longest)
                children[node] = []
                children[parent].append(node)
                proposed.append(node)
        kept = sorted(chance.sample(proposed, min(shape.keep, len(proposed))))
    characters = max(1, round(shape.prompt_tokens * shape.characters_a_token))
    return ThoughtTree(passage(characters, seed), False, lay_out(lengths, children))

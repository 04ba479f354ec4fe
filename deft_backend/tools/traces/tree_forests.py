"""Build PrefixForests from recorded or described trees, for `deft explain` and benchmarks."""

from collections.abc import Hashable
from itertools import pairwise

from deft_backend.forest import PrefixForest, forest_from_paths
from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree, TokenTree, TraceError

CHARACTERS_A_TOKEN = 4  # estimate for prompts that a token-tree recording holds as text only

# Limits of a described tree.
MOST_PATH_TOKENS = (1 << 31) - 1  # from root to leaf
MOST_NODES = 1 << 20  # on a level


def forest_at(tree: ThoughtTree, iteration: int) -> PrefixForest:
    """The forest of the step in which the tree decodes token number `iteration`. Every thought that
    decodes in this step is a query. Its own tokens include this iteration's, whose key and value
    the server writes before. Iteration 0 is the prompt's last token.
    """
    if not tree.nodes:
        raise TraceError("this tree was recorded as incomplete and holds no nodes; choose another")
    live = tree.live(iteration)
    if not live or iteration < 0:
        raise TraceError(
            f"nothing is decoded at iteration {iteration}; expected 0 to {tree.last_iteration}"
        )
    paths: list[list[tuple[Hashable, int]]] = []
    lengths: list[int] = []
    for thought in live:
        above = [tree.nodes[node] for node in tree.path(thought.id)[:-1]]
        paths.append([(node.id, node.tokens) for node in above if node.tokens])
        lengths.append(sum(node.tokens for node in above) + iteration - thought.start + 1)
    return forest_from_paths(paths, lengths)


def token_tree_forest(tree: TokenTree, record: int, step: int) -> PrefixForest:
    """The forest of a recording's step: each candidate is a query and a node of one token."""
    if not 0 <= record < len(tree.accepted):
        raise TraceError(f"there is no record {record}; expected 0 to {len(tree.accepted) - 1}")
    accepted = tree.accepted[record]
    if not 0 <= step < len(accepted):
        raise TraceError(f"nothing is decoded at step {step}; expected 0 to {len(accepted) - 1}")
    prompt = max(1, len(tree.prompts[record]) // CHARACTERS_A_TOKEN)
    context = prompt + sum(accepted[:step]) + 1
    paths: list[list[tuple[Hashable, int]]] = [[(ROOT, context)]]
    for path in tree.paths:
        choices = [(path[:depth], 1) for depth in range(1, len(path) + 1)]
        paths.append([(ROOT, context), *choices])
    return forest_from_paths(paths, [context, *(context + len(path) for path in tree.paths)])


def forest_from_levels(description: str) -> PrefixForest:
    """A tree described as ``nodes per level  tokens per node at each level``. ``1,4,16
    1024,256,32`` is one root of 1024 tokens, 4 nodes of 256 below it and 16 of 32 below those, one
    query each. Several roots make a forest. Raises TraceError.
    """
    try:
        nodes, tokens = ([int(n) for n in part.split(",")] for part in description.split())
    except ValueError:
        nodes, tokens = [], []
    falls = any(here < above for above, here in pairwise(nodes))
    if not nodes or len(nodes) != len(tokens) or min(nodes + tokens) < 1 or falls:
        raise TraceError(
            f"the tree is described as {description!r}; expected something like "
            "'1,4,16 1024,256,32': nodes per level, then tokens per node. All are 1 or more, and "
            "no level has fewer nodes than the one above it"
        )
    if sum(tokens) > MOST_PATH_TOKENS or max(nodes) > MOST_NODES:
        raise TraceError(
            f"the tree {description!r} is too large; expected at most {MOST_PATH_TOKENS:,} tokens "
            f"from root to leaf and {MOST_NODES:,} nodes on a level"
        )
    paths: list[list[tuple[Hashable, int]]] = []
    for leaf in range(nodes[-1]):
        path: list[tuple[Hashable, int]] = []
        node = leaf
        for level in reversed(range(len(nodes))):
            path.append(((level, node), tokens[level]))
            node = node * nodes[level - 1] // nodes[level] if level else 0
        paths.append(path[::-1])
    return forest_from_paths(paths, [sum(tokens)] * nodes[-1])

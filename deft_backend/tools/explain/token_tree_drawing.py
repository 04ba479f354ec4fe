"""Draw a token tree: the query tokens of a request, and how many of them see each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from rich.tree import Tree

from deft_backend.shapes.query_blocks import QueryBlocks

MAX_TOKENS = 60
"""Query tokens drawn by default."""

BoolArray = npt.NDArray[np.bool_]


def seen_from_parents(parents: tuple[int, ...]) -> BoolArray:
    """[n, n] bool: which query tokens each sees, itself and its ancestors; -1 is no parent.

    >>> seen_from_parents((-1, 0, 0)).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    seen = np.eye(len(parents), dtype=np.bool_)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


def seen_from_bits(bits: npt.NDArray[np.int64]) -> BoolArray:
    """[n, n] bool of `ancestors` bits [n, words], as `TreeAttention.run` takes them.

    >>> seen_from_bits(np.array([[0b001], [0b011], [0b101]])).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    as_bytes = np.ascontiguousarray(bits, dtype=np.int64).view(np.uint8)
    unpacked = np.unpackbits(as_bytes, axis=-1, bitorder="little")
    return unpacked[:, : len(bits)].astype(np.bool_)


def draw_token_tree(seen: BoolArray, gqa_group: int = 1, max_tokens: int = MAX_TOKENS) -> Tree:
    """A drawing of the query tokens of one request, for a terminal.

    Each query token stands below its parent: the ancestor that sees most tokens. Each line says
    how many query tokens see the token.

    - `seen`: which query tokens each sees.
    - `gqa_group`: Query heads that share a KV head; it decides how many query blocks read the
      context.
    - `max_tokens`: Query tokens to draw; a last line counts the rest.
    """
    tokens = len(seen)
    blocks = QueryBlocks.of(tokens, gqa_group).blocks
    pairs = int(seen.sum())
    root = Tree(
        f"{tokens} query tokens in {blocks} query block{'s' if blocks > 1 else ''} · "
        f"{pairs:,} of {tokens * tokens:,} pairs seen · {-(-tokens // 64)} × 64 bits a token",
        highlight=False,
    )
    above = seen & ~np.eye(tokens, dtype=np.bool_)
    depth = above.sum(axis=1)
    seen_by = seen.sum(axis=0)
    drawn: dict[int, Tree] = {}
    for token in np.argsort(depth, kind="stable").tolist()[:max_tokens]:
        ancestors = np.flatnonzero(above[token])
        parent = int(ancestors[depth[ancestors].argmax()]) if len(ancestors) else -1
        sees_itself = "" if seen[token, token] else " · does not see itself"
        drawn[token] = drawn.get(parent, root).add(
            f"token {token} · seen by {seen_by[token]}{sees_itself}"
        )
    if tokens > max_tokens:
        root.add(f"… {tokens - max_tokens} more")
    return root

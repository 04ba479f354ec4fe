"""The forest of a decode batch, read from the nodes of SGLang's radix trees."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_paths
from deft_backend.hosts.sglang.versions import TreePaths, place_of


class TreeError(ValueError):
    """A radix tree with an unexpected structure."""


class RadixTreeSource:
    """Walks from each request's last node to the root, by the nodes' ``parent`` and ``key``."""

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        """Forest of a decode batch. Raises ForestError if a node has no tokens."""
        return _forest(requests, seq_lens, _nodes_above)


class UnifiedTreeSource:
    """Reads paths of the tree; its core is in Rust or in Python.

    - `paths`: Lists the nodes on the path from the root to each given node.
    """

    def __init__(self, paths: TreePaths) -> None:
        self._paths = paths

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        """Forest of a decode batch.

        Raises TreeError if tokens on a path are not on the device, or a node does not start where
        its parent ends.
        """
        ends = list({request.last_node: None for request in requests if _is_held(request)})
        paths = dict(zip(ends, self._paths(ends) if ends else (), strict=True))
        return _forest(requests, seq_lens, lambda end: _checked(paths[end]))


def _forest(
    requests: Sequence[Any],
    seq_lens: npt.NDArray[np.integer],
    nodes_to: Callable[[Any], Iterable[tuple[int, int]]],
) -> PrefixForest:
    """The forest of the requests' paths.

    A path is cut to what the tree owns of the request, and to ``seq_len - 1`` tokens. A cut node
    differs from the whole node.

    - `nodes_to`: from the node at the end of a path to ids and tokens of the path's nodes.
    """
    paths = []
    for request, length in zip(requests, seq_lens.tolist(), strict=True):
        path: list[tuple[tuple[int, int], int]] = []
        left = min(place_of(request)[1], length - 1)
        if _is_held(request) and left > 0:
            for node, tokens in nodes_to(request.last_node):
                held = min(tokens, left)
                path.append(((node, held), held))
                left -= held
                if left == 0:
                    break
        paths.append(path)
    return forest_from_paths(paths, seq_lens)


def _is_held(request: Any) -> bool:
    """Whether the tree holds a request: there is one, and the host has not released the request."""
    return request.last_node is not None and place_of(request)[0] is not None


def _nodes_above(node: Any) -> list[tuple[int, int]]:
    """Ids and tokens of the plain tree's nodes, from below the root down to `node`."""
    nodes = []
    while node.parent is not None:
        nodes.append((node.id, len(node.key)))
        node = node.parent
    return nodes[::-1]


def _checked(path: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Ids and tokens of the unified tree's nodes on a path."""
    end = 0
    for part in path:
        where = f"node {part.node_id} of the radix tree"
        if part.path_start != end:
            raise TreeError(f"{where} starts at token {part.path_start}, its parent ends at {end}")
        end = part.path_end
        tokens = end - part.path_start
        if part.full_value_len != tokens:
            raise TreeError(
                f"{where} has {part.full_value_len} of its {tokens} tokens on the device"
            )
        yield part.node_id, tokens

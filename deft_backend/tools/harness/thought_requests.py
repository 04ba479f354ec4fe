"""A recorded tree of thoughts as requests: one request for each thought."""

from collections.abc import Callable

from deft_backend.tools.harness.workload import Prompt, Request
from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree


def thought_requests(
    tree: ThoughtTree, prompt: Prompt, mark: Callable[[int], Prompt]
) -> tuple[Request, ...]:
    """The requests that replay a tree: the children of a thought start when it ends.

    A thought without tokens is not sent; its children continue its parent.

    - `prompt`: the root's prompt.
    - `mark`: a short text or token ids for each node. It makes a thought differ from its siblings;
      greedy decoding would give all of them the same answer.
    """
    requests: list[Request] = []
    pending = _children(tree, ROOT, None)
    while pending:
        node, after = pending.pop()
        thought = tree.nodes[node]
        name = after
        if thought.tokens:
            name = thought_name(node)
            own = mark(node)
            if after is None:
                own = prompt + own  # type: ignore[operator]
            requests.append(Request(name, own, thought.tokens, after=after))
        pending.extend(_children(tree, node, name))
    return tuple(requests)


def thought_name(node: int) -> str:
    """The name of a node's request."""
    return f"thought {node}"


def _children(tree: ThoughtTree, node: int, name: str | None) -> list[tuple[int, str | None]]:
    """Children of `node`, last first, each with the request that it continues."""
    return [(child, name) for child in reversed(tree.nodes[node].children)]

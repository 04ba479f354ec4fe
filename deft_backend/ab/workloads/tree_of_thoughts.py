"""Tree of thoughts: a trace replayed, branching and pruning where it was recorded to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deft_backend.ab.invented_tree import ThoughtTreeShape, generate_thought_tree
from deft_backend.harness.request_plan import Request, RequestPlan, WorkloadError
from deft_backend.traces.trace_files import ROOT, ThoughtTree


@dataclass(frozen=True)
class TreeOfThoughts:
    """Replays `tree`: a request a thought, whose children start when it ends.

    A child's prompt is its parent's prompt and answer and a line that tells it from its siblings
    (greedy decoding would make them all alike). Thoughts that were recorded as empty are not sent.
    """

    tree: ThoughtTree = field(default_factory=lambda: generate_thought_tree(ThoughtTreeShape()))
    scale: float = 1.0

    def plan(self) -> RequestPlan:
        if not self.tree.nodes:
            raise WorkloadError("the trace's tree holds no nodes (it was recorded as incomplete)")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise WorkloadError(f"the scale is {self.scale}; expected a number above 0")
        tree = self.tree.scaled(self.scale)
        requests: list[Request] = []
        pending = _below(tree, ROOT, None)
        while pending:
            node, after = pending.pop()
            thought = tree.nodes[node]
            name = after
            if thought.tokens:
                name = f"thought {node}"
                mark = _mark(node)
                prompt = mark if after is not None else tree.prompt + mark
                requests.append(Request(name, prompt, thought.tokens, after=after))
            pending.extend(_below(tree, node, name))
        if not requests:
            raise WorkloadError("the trace's tree holds a prompt but no thoughts; choose another")
        return RequestPlan(
            "tree-of-thoughts",
            f"{len(requests)} thoughts, {tree.last_iteration} iterations, scale {self.scale:g}",
            (tree.prompt,),
            tuple(requests),
        )


def _below(tree: ThoughtTree, node: int, name: str | None) -> list[tuple[int, str | None]]:
    """Children of `node`, last first, with the request they come after."""
    return [(child, name) for child in reversed(tree.nodes[node].children)]


def _mark(node: int) -> str:
    """Tells thoughts apart, and has one clear answer: greedy decoding stays away from ties."""
    return f"\n\nCount from {node} to {node + 12}."

"""Tree of thoughts: replays a recorded trace, with its branches and prunings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from deft_backend.tools.ab.invented_tree import ThoughtTreeShape, generate_thought_tree
from deft_backend.tools.harness.request_plan import RequestPlan, WorkloadError
from deft_backend.tools.harness.thought_requests import thought_requests
from deft_backend.tools.traces.trace_files import ThoughtTree


@dataclass(frozen=True)
class TreeOfThoughts:
    """Replays `tree`: one request for each thought; its children start when it ends.

    A child's prompt is its parent's prompt and answer, and a line of its own. Without that line,
    greedy decoding would give all siblings the same answer. The replay sends no request for a
    thought recorded as empty.
    """

    tree: ThoughtTree = field(default_factory=lambda: generate_thought_tree(ThoughtTreeShape()))
    scale: float = 1.0

    def plan(self) -> RequestPlan:
        if not self.tree.nodes:
            raise WorkloadError("the trace's tree holds no nodes (it was recorded as incomplete)")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise WorkloadError(f"the scale is {self.scale}; expected a number above 0")
        tree = self.tree.scaled(self.scale)
        requests = thought_requests(tree, tree.prompt, _mark)
        if not requests:
            raise WorkloadError("the trace's tree holds a prompt but no thoughts; choose another")
        return RequestPlan(
            "tree-of-thoughts",
            f"{len(requests)} thoughts, {tree.last_iteration} iterations, scale {self.scale:g}",
            (tree.prompt,),
            requests,
        )


def _mark(node: int) -> str:
    """A line that makes thoughts differ. Its one clear answer avoids ties in greedy decoding."""
    return f"\n\nCount from {node} to {node + 12}."

"""Tree attention under one of our policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from deft_backend import TreeAttention, get_policy
from deft_backend.kernels import Gpu
from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import Settings
from deft_backend.shapes import QueryBlocks

PLANNERS = ("host", "device")


class Ours(Method):
    """:class:`~deft_backend.TreeAttention`; with the policy ``flash-decoding``, a peer of itself.

    - `planner`: one of :data:`PLANNERS`. Servers decode with device plans inside their CUDA graphs.
      The method then uses the servers' capacity, and makes every kernel launch that a batch of that
      size can need. The CPU does not know the tile shapes of the plan's items.
    - `as_on`: a GPU such as ``sm_89``: the plain kernels run, in its configuration, on this GPU's
      SMs.

    Raises PolicyError if the policy is unknown.
    """

    def __init__(
        self, name: str, policy: str, planner: str = "host", as_on: str | None = None
    ) -> None:
        self.name = name
        self.as_on = as_on
        self.policy = get_policy(policy).name
        self.planner = planner

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def attention(self, inputs: Inputs) -> TreeAttention:
        """A tree attention for the shape of a case, without a plan."""
        return TreeAttention(
            num_query_heads=inputs.case.query_heads,
            num_kv_heads=inputs.case.kv_heads,
            head_dim=inputs.head_dim,
            dtype=inputs.q.dtype,
            device=inputs.device,
            page_size=inputs.case.page_size,
            max_batch=self.most_requests(inputs),
            query_tokens=inputs.query_tokens,
            policy=self.policy,
            kv_dtype=inputs.k_cache.dtype,
            compiled_for=None if self.as_on is None else _described(self.as_on, inputs.device),
        )

    def most_requests(self, inputs: Inputs) -> int:
        """The largest batch that the attention has capacity for: a server's, if it is larger."""
        blocks = QueryBlocks.of(
            inputs.query_tokens, inputs.case.query_heads // inputs.case.kv_heads
        ).blocks
        most = largest_batch() // blocks
        if inputs.batch > most and self.planner == "device":
            raise Refused(f"{inputs.batch} requests; device plans hold at most {most}")
        return max(inputs.batch, min(Settings().max_batch, most))

    def prepare(self, inputs: Inputs) -> Prepared:
        attention = self.attention(inputs)
        facts = self.make_plan(attention, inputs)
        facts["workspace_bytes"] = attention.workspace_bytes

        def plan() -> torch.Tensor:
            self.make_plan(attention, inputs)
            return inputs.seq_lens

        return Prepared(
            _launch(attention, inputs),
            poison=attention.poison_workspace,
            plan=plan if self.planner == "device" else None,
            facts=facts,
        )

    def make_plan(self, attention: TreeAttention, inputs: Inputs) -> dict[str, int]:
        """Plan the case's batch; returns facts about the plan."""
        if self.planner == "device":
            attention.plan_batch(
                inputs.page_table, inputs.seq_lens, query_tokens=inputs.query_tokens, on_device=True
            )
            return {}
        plan = attention.plan(inputs.forest, query_tokens=inputs.query_tokens)
        return {"items": plan.num_items, "partials": plan.num_partials}

    def origin(self) -> str:
        as_on = "" if self.as_on is None else f", kernels as on {self.as_on}"
        return f"deft-backend, policy {self.policy}, planned on the {self.planner}{as_on}"


def _described(name: str, device: torch.device) -> Gpu:
    """A GPU of another kind with the SMs of this one."""
    return replace(Gpu.named(name), sms=Gpu.at(device).sms)


def _launch(attention: TreeAttention, inputs: Inputs) -> Callable[[], torch.Tensor]:
    out = torch.empty_like(inputs.q)

    def launch() -> torch.Tensor:
        return attention.run(*inputs.attended, ancestors=inputs.ancestors, out=out)

    return launch

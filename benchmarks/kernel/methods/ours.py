"""Tree attention under one of our policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from deft_backend import TreeAttention, get_policy
from deft_backend.kernels import Gpu
from deft_backend.planner import Plan
from deft_backend.planner.encoding import ITEM_ORDER
from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import Settings
from deft_backend.shapes import QueryBlocks

PLANNERS = ("host", "device")


class Ours(Method):
    """:class:`~deft_backend.TreeAttention`; with the policy ``flash-decoding``, a peer of itself.

    Parameters
    ----------
    name, policy : str
    planner : str
        One of :data:`PLANNERS`. Servers decode with device plans inside their CUDA graphs. The
        method then uses the servers' capacity, and makes every kernel launch that a batch of that
        size can need. The CPU does not know the tile shapes of the plan's items.
    as_on : str, optional
        A GPU such as ``sm_89``: the plain kernels run, in its configuration, on this GPU's SMs.

    Raises
    ------
    PolicyError
        If the policy is unknown.
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
        return Prepared(_launch(attention, inputs), poison=attention.poison_workspace, facts=facts)

    def make_plan(self, attention: TreeAttention, inputs: Inputs) -> dict[str, int]:
        """Plan the case's batch; returns facts about the plan."""
        if self.planner == "device":
            attention.plan_on_device(
                inputs.page_table, inputs.seq_lens, query_tokens=inputs.query_tokens
            )
            return {}
        plan = attention.plan(inputs.forest, query_tokens=inputs.query_tokens)
        return {"items": plan.num_items, "partials": plan.num_partials}

    def phases(self, inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield each kernel launch alone, by name; use it before you take the next one."""
        attention = self.attention(inputs)
        launch = _launch(attention, inputs)
        for name, plan in alone(attention.plan(inputs.forest)).items():
            attention.use(plan, inputs.forest)
            yield name, launch

    def origin(self) -> str:
        as_on = "" if self.as_on is None else f", kernels as on {self.as_on}"
        return f"deft-backend, policy {self.policy}, planned on the {self.planner}{as_on}"


def _described(name: str, device: torch.device) -> Gpu:
    """A GPU of another kind with the SMs of this one."""
    return replace(Gpu.named(name), sms=Gpu.at(device).sms)


def _launch(attention: TreeAttention, inputs: Inputs) -> Callable[[], torch.Tensor]:
    out = torch.empty_like(inputs.q)

    def launch() -> torch.Tensor:
        return attention.run(
            inputs.q, inputs.k_cache, inputs.v_cache, inputs.page_table, inputs.seq_lens,
            ancestors=inputs.ancestors, out=out,
        )  # fmt: skip

    return launch


STAGE_1 = ("small_tile", "large_tile", "masked_tile")
"""The kernel launches of stage 1, by tile shape."""

STAGE_2 = "reduction"


def alone(plan: Plan) -> dict[str, Plan]:
    """One plan for each kernel launch of `plan` that has items, by the launch's name.

    Run in this order, the plans give the result of `plan`: partial results stay in the workspace.
    Their times add up to more than that of `plan`, whose launches overlap.
    """
    found = {}
    nothing = {
        "reduce_query": plan.reduce_query[:0], "reduce_ptr": plan.reduce_ptr[:1],
    }  # fmt: skip
    for shape in reversed(range(len(ITEM_ORDER))):
        begin, end = plan.items_of(shape)
        if end > begin:
            # The other shapes get an empty range of items; no item changes its place.
            place = ITEM_ORDER.index(shape)
            tile_ptr = np.where(np.arange(len(plan.tile_ptr)) <= place, begin, end)
            found[STAGE_1[shape]] = replace(plan, tile_ptr=tile_ptr.astype(np.int32), **nothing)
    if len(plan.reduce_query):
        found[STAGE_2] = replace(plan, tile_ptr=np.full_like(plan.tile_ptr, plan.tile_ptr[-1]))
    return found

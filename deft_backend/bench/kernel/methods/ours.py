"""Tree attention under one of our policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deft_backend import TreeAttention, get_policy
from deft_backend.bench.kernel.inputs import Inputs
from deft_backend.bench.kernel.methods.base import Method, Prepared
from deft_backend.bench.kernel.phases import alone


class Ours(Method):
    """:class:`~deft_backend.TreeAttention`; with the policy ``flash-decoding``, a peer of itself.

    Raises
    ------
    PolicyError
        If there is no such policy.
    """

    def __init__(self, name: str, policy: str) -> None:
        self.name = name
        self.policy = get_policy(policy).name

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def attention(self, inputs: Inputs) -> TreeAttention:
        """An attention of the shape of a case, with nothing planned."""
        return TreeAttention(
            num_query_heads=inputs.case.query_heads,
            num_kv_heads=inputs.case.kv_heads,
            head_dim=inputs.head_dim,
            dtype=inputs.q.dtype,
            device=inputs.device,
            page_size=inputs.case.page_size,
            max_batch=inputs.batch,
            policy=self.policy,
        )

    def prepare(self, inputs: Inputs) -> Prepared:
        attention = self.attention(inputs)
        plan = attention.plan(inputs.forest)
        return Prepared(
            _launch(attention, inputs),
            poison=attention.poison_workspace,
            facts={
                "items": plan.num_items,
                "partials": plan.num_partials,
                "workspace_bytes": attention.workspace_bytes,
            },
        )

    def phases(self, inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each launch by itself, to be called or captured, and replayed, before the next is asked
        for."""
        attention = self.attention(inputs)
        launch = _launch(attention, inputs)
        for name, plan in alone(attention.plan(inputs.forest)).items():
            attention.use(plan, inputs.forest)
            yield name, launch

    def origin(self) -> str:
        return f"deft-backend, policy {self.policy}"


def _launch(attention: TreeAttention, inputs: Inputs) -> Callable[[], torch.Tensor]:
    out = torch.empty_like(inputs.q)

    def launch() -> torch.Tensor:
        return attention.run(
            inputs.q, inputs.k_cache, inputs.v_cache, inputs.page_table, inputs.seq_lens, out=out
        )

    return launch

"""What travels from vLLM to the kernels: a step's tensors, and one layer's part of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from deft_backend.hosts.vllm.layers import Layer
from deft_backend.telemetry.counters import Decoded


class Group(Protocol):
    """What a layer asks of its step's group; ``group.py`` implements it."""

    columns: int  # most pages of a request; vLLM's tables are wider in models with an encoder

    def repeat(self, step: TreeStep, owner: Any, *tensors: torch.Tensor) -> bool:
        """Launch a layer (queries, KV cache, output) as the one before; False: :meth:`attend`."""

    def attend(self, step: TreeStep, call: LayerCall) -> bool:
        """Compute a layer into its output; False if the host's implementation must."""

    def leave(self, step: TreeStep, reason: str) -> None:
        """The host's implementation computes a layer of the step, and this group's later steps."""


class Picked(NamedTuple):
    """The requests of a step that stand among others, and their query tokens, one each."""

    requests: torch.Tensor  # [B] int64, on the device
    tokens: torch.Tensor  # [B] int64, on the device


@dataclass
class TreeStep:
    """The data of a step that the host's metadata lacks; attached to that metadata.

    In decode each request has one query token. In verification it has up to `query_tokens`: one
    behind the verified ones, and a chain of draft tokens.

    The first layer that runs makes the plan, so a captured graph repeats the planning at every
    replay. A layer that runs a second time begins a new pass, with a new plan: the host warms up
    with the metadata that it captures.
    """

    group: Group  # Tree attention of the group's layers
    # The host's own tensors on the device, which it fills again in each step.
    page_table: torch.Tensor  # [B, P] int32
    seq_lens: torch.Tensor  # [B] int32, with the query tokens; 0 for padding requests
    tokens: int  # Rows of the batch's queries
    query_tokens: int = 1  # most query tokens of a request
    # [B + 1] int32, in verification: the first row of each request.
    query_start: torch.Tensor | None = None
    # In a mixed step: the host's metadata of the requests behind these. Their rows follow `tokens`.
    rest: Any = None
    # In a batch of a graph that holds both attentions: the host's metadata of all rows. The one
    # that carries this step is of the rows that tree attention leaves.
    whole: Callable[[], Any] | None = None
    # In a mixed step that is not split: the host computes all rows, and these are then replaced.
    picked: Picked | None = None
    counted: Decoded | None = None  # what the counters hold of this step
    ran: set[int] = field(default_factory=set)  # layers that ran in this pass

    def __post_init__(self) -> None:
        if self.page_table.shape[1] > self.group.columns:
            self.page_table = self.page_table[:, : self.group.columns]

    @property
    def size(self) -> tuple[int, int]:
        return len(self.seq_lens), self.query_tokens

    def with_page_table(self, group: Group, page_table: torch.Tensor, rest: Any) -> TreeStep:
        """The same requests in another group's page table [rows, P]."""
        mine = slice(len(self.seq_lens)) if self.picked is None else self.picked.requests
        rows = page_table[mine]
        return replace(self, group=group, page_table=rows, rest=rest, counted=None, ran=set())


class LayerCall(NamedTuple):
    owner: object  # the layer's implementation; it identifies the layer within a pass
    layer: Layer
    # [T, Hq, D]; the batch's query tokens at the step's first `tokens` indices; padding follows.
    query: torch.Tensor
    output: torch.Tensor
    kv_cache: torch.Tensor  # [pages, Hkv, page_size, 2 * D]; with MLA [pages, page_size, D]
    sinks: torch.Tensor | None  # [Hq]; the sink of each query head
    host: Callable[[], object]  # Runs the host's implementation into the same `output`
    # With MLA: the rotated parts of the queries. `query` and `output` are [T, Hq, value_dim].
    query_rope: torch.Tensor | None = None


def step_of(metadata: Any) -> TreeStep | None:
    step: TreeStep | None = getattr(metadata, "deft_step", None)
    return step

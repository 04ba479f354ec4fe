"""What travels from vLLM to the kernels: a step's tensors, and one layer's part of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from deft_backend.hosts.vllm.start.layers import Layer

_ATTRIBUTE = "deft_step"


class Group(Protocol):
    """What a layer asks of its step's group; ``group.py`` implements it."""

    extends: bool  # whether its steps are short extends, which are no decode steps

    def attend(self, step: TreeStep, call: LayerCall) -> bool:
        """Compute a layer into its output; False if the host's implementation must."""

    def leave(self, reason: str) -> None:
        """Note that a layer of planned steps runs in the host's kernel; log each reason once."""


@dataclass
class TreeStep:
    """The data of a step that the host's metadata lacks; attached to that metadata.

    In decode each request has one query token. In verification it has up to `query_tokens`: one
    behind the verified ones, and a chain of draft tokens. In a short extend these are its new ones.

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
    counted: int = 0  # Query tokens of a verification that the builder has counted as verified
    ran: set[int] = field(default_factory=set)  # layers that ran in this pass
    unplanned: bool = False  # planning failed: the host's implementation runs all layers

    def with_page_table(self, group: Group, page_table: torch.Tensor) -> TreeStep:
        """The same requests in another group's page table [rows, P]."""
        rows = page_table[: len(self.seq_lens)]
        return replace(self, group=group, page_table=rows, counted=0, ran=set(), unplanned=False)


class LayerCall(NamedTuple):
    """One layer's part of a step."""

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


def attach(metadata: Any, step: TreeStep | None) -> None:
    """Attach a step to the host's metadata; None detaches the step of a copied metadata."""
    setattr(metadata, _ATTRIBUTE, step)


def is_attached(metadata: Any) -> bool:
    """Whether our builder has made the metadata, with a step or without."""
    return hasattr(metadata, _ATTRIBUTE)


def step_of(metadata: Any) -> TreeStep | None:
    """The step attached to a metadata; None if the host's implementation runs."""
    step: TreeStep | None = getattr(metadata, _ATTRIBUTE, None)
    return step


# Questions about the host's CommonAttentionMetadata


def prefills(common: Any) -> bool:
    """Whether some request of a batch still computes its prompt.

    If the runner does not say, only prompts with documents count: within these, tokens attend to
    later tokens. Causal attention is right for all others.
    """
    prefilling = common.is_prefilling
    return bool(common.mm_req_doc_ranges if prefilling is None else prefilling.any())


def is_step(common: Any, query_tokens: int) -> bool:
    """Whether a batch is a decode or a verification of at most `query_tokens` tokens a request."""
    longest = int(common.max_query_len)
    return longest == 1 or (1 < longest <= query_tokens and not prefills(common))


def context_tokens(common: Any) -> int:
    """Tokens of context of a batch; 0 if the CPU does not know them."""
    lens = common.seq_lens_cpu_upper_bound
    if lens is None and common.seq_lens.device.type == "cpu":
        lens = common.seq_lens
    return 0 if lens is None else int(lens.numpy()[: common.num_reqs].sum())

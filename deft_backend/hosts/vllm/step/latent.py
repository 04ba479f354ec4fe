"""The group of an MLA model's layers: steps that share enough run through `LatentAttention`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deft_backend.attention import LatentAttention
from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.common.division import LayerShape
from deft_backend.hosts.common.latent import gains_too_little
from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.vllm.step.extends import CachedPrefixes
from deft_backend.hosts.vllm.step.group import GroupAttention
from deft_backend.hosts.vllm.step.step import LayerCall, TreeStep
from deft_backend.settings.config import Settings

UNKNOWN = "blocks of unknown requests"
UNEVEN = "requests without all their drafts"


class LatentSharing(CachedPrefixes):
    """Decides whether the scheduler's next batch shares enough for a plan to gain.

    It knows a request's blocks from the scheduler's messages, so all ranks decide alike and nobody
    waits for the GPU. A batch keeps its decision until its requests change: tokens that they
    generate are read once either way.

    - `block_tokens`: of a block in the messages.
    """

    keeps_new_blocks = True

    def __init__(
        self, attention: LatentAttention, settings: Settings, num_layers: int, block_tokens: int
    ) -> None:
        super().__init__()
        self._attention, self._settings = attention, settings
        self._num_layers, self._block_tokens = num_layers, block_tokens
        self._requests: set[str] = set()
        self._reason: str | None = UNKNOWN

    def too_little(self) -> str | None:
        """Why the host's kernel decodes the last message's batch, or None."""
        if self._scheduled.keys() != self._requests:
            self._reason = self._decide()
            self._requests = set(self._scheduled)
        return self._reason

    def _decide(self) -> str | None:
        blocks = [self.blocks_of(request) for request in self._scheduled]
        known = [each for each in blocks if each is not None]
        if not known or len(known) != len(blocks):
            return UNKNOWN
        lens = np.array([len(each) for each in known])
        tables = np.zeros((len(known), int(lens.max())), dtype=np.int32)
        for row, each in zip(tables, known, strict=True):
            row[: len(each)] = each
        size = self._block_tokens
        forest = forest_from_page_tables(tables, lens * size, size, check=False)
        return gains_too_little(self._attention, forest, self._num_layers)


@dataclass(eq=False)
class LatentGroup(GroupAttention):
    """The `LatentAttention` of one attention group; the device planner makes its plans.

    The host captures two sets of full graphs (``deft_patches/vllm/tree_graphs.py``), and each step
    replays the one that its sharing asks for.
    """

    attention: Any  # a `LatentAttention`; this class replaces every use of what that lacks
    sharing: LatentSharing = field(kw_only=True)
    _captures_tree: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        held = self.attention.shape
        self.shape = LayerShape(held.num_query_heads, 1, held.latent_dim)
        self.dtype = self.kv_dtype = held.dtype
        self.page_size, self.query_tokens = held.page_size, self.attention.query_tokens

    def refuses(self, requests: int) -> str | None:
        """Not for a failure: it may be this rank's alone, and all ranks must replay one graph."""
        return refused(requests, self.settings, self.attention.max_batch)

    def uneven(self, common: Any) -> str | None:
        """A plan has one number of query tokens, and the rows of each request follow from it.

        vLLM captures full graphs of that number and replays them for batches whose requests all
        have it. Only padding requests, behind the others, have none. But steps without a graph, and
        graphs of dynamic speculation, may have fewer. The scheduler's message decides the numbers,
        so all ranks see the same.
        """
        tokens, batch = self.query_tokens, int(common.num_reqs)
        if tokens == 1:  # the builder has seen that each request has one
            return None
        if common.num_actual_tokens != batch * tokens:
            return UNEVEN
        # The builder has seen that no request has more. So these are all full if their sum is.
        starts = common.query_start_loc_cpu.numpy()
        requests = int(starts[batch]) // tokens
        return None if starts[requests] == starts[batch] == requests * tokens else UNEVEN

    def too_little(self, *, capturing: bool) -> str | None:
        if capturing:
            return None if self._captures_tree else "captured for the host's kernel"
        try:
            return self.sharing.too_little()
        except Exception as error:
            self._log.batch_left(error)
            return "planning failed"

    def capture_tree(self, capturing: bool) -> None:
        """The host captures graphs with tree attention from now on, or no longer."""
        self._captures_tree = capturing

    def takes_step(self) -> bool:
        """Whether tree attention decodes the step whose metadata was made last."""
        return self.current is not None

    def _run(self, step: TreeStep, call: LayerCall, rows: torch.Tensor) -> None:
        self.attention.run(
            call.query, call.query_rope, call.kv_cache, step.page_table,
            sm_scale=call.layer.sm_scale, out=rows,
        )  # fmt: skip

"""Multi-head latent attention (MLA) by vLLM's own kernel, FlashAttention-3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm import envs

from deft_backend.attention import LatentAttention, LatentCall
from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.common.latent import checked_latent_attention, gains_too_little
from deft_backend.hosts.common.limits import Unsupported, refused, same_on_all_ranks
from deft_backend.hosts.vllm.cached_prefixes import CachedPrefixes
from deft_backend.hosts.vllm.content import Content
from deft_backend.hosts.vllm.group import GroupAttention
from deft_backend.hosts.vllm.layers import Layer, query_tokens_of
from deft_backend.hosts.vllm.server import untold
from deft_backend.hosts.vllm.step import LayerCall, TreeStep
from deft_backend.hosts.vllm.versions import VLLM
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import MIXED
from deft_patches.vllm import tree_graphs

UNKNOWN = "blocks of unknown requests"
UNEVEN = "requests without all their drafts"


class LatentSharing(CachedPrefixes):
    """Decides whether the scheduler's next batch shares enough for a plan to gain. It knows a
    request's blocks from the scheduler's messages, so all ranks decide alike and nobody waits for
    the GPU. A batch keeps its decision until its requests change.
    """

    keeps_generated = True

    def __init__(self, attention: LatentAttention, num_layers: int, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._attention = attention
        self._num_layers = num_layers
        self._requests: set[str] = set()
        self._reason: str | None = UNKNOWN

    def too_little(self) -> str | None:
        if self.scheduled.keys() != self._requests:
            self._reason = self._decide()
            self._requests = set(self.scheduled)
        return self._reason

    def _decide(self) -> str | None:
        blocks = [self.blocks_of(request) for request in self.scheduled]
        known = [each for each in blocks if each is not None]
        if not known or len(known) != len(blocks):
            return UNKNOWN
        lens = np.array([len(each) for each in known])
        tables = np.zeros((len(known), int(lens.max())), dtype=np.int32)
        for row, each in zip(tables, known, strict=True):
            row[: len(each)] = each
        size = self.block_tokens
        forest = forest_from_page_tables(tables, lens * size, size, check=False)
        return gains_too_little(self._attention, forest, self._num_layers)


@dataclass(eq=False)
class LatentGroup(GroupAttention):
    """The `LatentAttention` of one attention group.

    The host captures two sets of full graphs (``deft_patches/vllm/tree_graphs.py``), and each step
    replays the one that its sharing asks for.
    """

    attention: LatentAttention
    sharing: LatentSharing = field(kw_only=True)
    _captures_tree: bool = field(default=False, init=False)

    def refuses(self, requests: int, query_tokens: int) -> str | None:
        """Not for a failure: it may be this rank's alone, and all ranks must replay one graph."""
        return refused(requests, self.settings, self.attention.max_batch)

    def _uneven(self, common: Any) -> str | None:
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

    def leaves(self, content: Content, common: Any, *, capturing: bool) -> str | None:
        if content.kind == MIXED:
            # The host's MLA divides such a step by its own rule, which this does not follow.
            return "a step with prefills over MLA"
        uneven = self._uneven(common)
        if uneven is not None:
            return uneven
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
        return self.current is not None

    def _run(self, step: TreeStep, call: LayerCall, rows: torch.Tensor) -> None:
        assert call.query_rope is not None, "MLA passes queries in two parts"
        read, scale = (call.kv_cache, step.page_table), call.layer.sm_scale
        self.attention.run(call.query, call.query_rope, *read, sm_scale=scale, out=rows)


BACKEND = "FLASH_ATTN_MLA"


def unsupported_latent(host: Any, settings: Settings) -> str | None:
    if host.is_sparse():
        return "sparse MLA is not supported"
    if envs.VLLM_BATCH_INVARIANT:
        return "batch-invariant mode of MLA models is not supported"
    if host.get_name() != BACKEND:
        return f"MLA through {host.get_name()} is not supported ({BACKEND} is)"
    return VLLM.leaves_mla(settings)


def latent_attention(
    layer: Layer, vllm_config: Any, device: torch.device, settings: Settings, **sizes: Any
) -> LatentAttention:
    """MLA for a group's layers, of `page_size` and `max_batch`."""
    assert layer.value_dim is not None
    tokens = query_tokens_of(vllm_config)
    parallel = vllm_config.parallel_config
    # A server with elastic expert parallelism may get more ranks while it runs.
    if parallel.data_parallel_size > 1 or getattr(parallel, "enable_elastic_ep", False):
        # Each rank would choose between its two sets of graphs by its own requests. But graphs hold
        # collectives, so all ranks must replay the same set.
        raise Unsupported("MLA with data parallelism is not supported")
    reason = untold(vllm_config)
    if device.type == "cuda" and not vllm_config.use_v2_model_runner:
        reason = "only model runner V2 has graphs for both (VLLM_USE_V2_MODEL_RUNNER=1)"
    if reason is not None:
        raise Unsupported(f"MLA cannot leave batches to the host: {reason}")
    heads, _, dim = layer.shape
    dims, dtype = (layer.value_dim, dim - layer.value_dim), vllm_config.model_config.dtype
    shaped, kernel = (heads, dims, dtype, device), vllm_latent_attention
    sizes["query_tokens"] = tokens
    return checked_latent_attention(*shaped, kernel, settings, integers=torch.int32, **sizes)


def capture_both(group: LatentGroup | None, vllm_config: Any, settings: Settings) -> str | None:
    """Ask for a second set of graphs, with tree attention; the reason if there is none, or None.
    All ranks must call this, also those whose set-up failed: ranks with different sets would wait
    for each other forever during the capture.
    """
    from vllm.distributed.parallel_state import get_tp_group

    ranks = vllm_config.parallel_config.tensor_parallel_size
    mine = None if group is None else (settings, group.attention.capacity, group.tree_layers)
    agreed = same_on_all_ranks(get_tp_group() if ranks > 1 else None, mine)
    if agreed is False:
        return "its ranks have different settings (DEFT_*)"
    if agreed is None or group is None:
        return "another rank has no tree attention"
    if group.attention.device.type == "cuda":
        tree_graphs.install(vllm_config, group)
    return None


def vllm_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention and its log-sum-exps, by vLLM's operator: its function hides arguments."""
    from vllm.vllm_flash_attn import flash_attn_interface  # noqa: F401

    operators: Any = torch.ops
    batch, values, nothing = call.batch, call.q_nope.shape[-1], None
    most_tokens = call.page_table.shape[1] * call.cache.shape[1]
    new, scales, rotary = (nothing,) * 2, (nothing,) * 3, (nothing,) * 3
    keys_and_values = (call.cache[..., values:], call.cache[..., :values])
    starts = (batch.query_start, nothing, nothing, nothing)  # none of keys, new keys; tokens in use
    paged = (call.page_table, batch.table_rows, batch.begin)
    most = (call.max_query_tokens, most_tokens)
    whole = (-1, -1, 0.0)  # no window, no soft cap
    interleaved, scheduler_metadata, packing, spare_sms, sinks = True, nothing, nothing, 0, nothing
    split = (call.most_splits, packing, spare_sms, sinks)
    context_parallel = (1, 0, nothing)
    out, lse, *_ = operators._vllm_fa3_C.fwd(
        *(call.q_rope, *keys_and_values, *new, call.q_nope, nothing),  # the last one: out
        *(*starts, batch.end, *most, *paged, *rotary, *scales, call.sm_scale, call.causal),
        *(*whole, interleaved, scheduler_metadata, *split, *context_parallel),
    )
    return out, lse

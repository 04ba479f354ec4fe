"""Multi-head latent attention (MLA): what a server needs for it, its layers and its sharing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from deft_backend.attention import LatentAttention, LatentCall
from deft_backend.hosts.common.latches import OnceLog
from deft_backend.hosts.common.latent import checked_latent_attention, gains_too_little
from deft_backend.hosts.common.limits import Division, LayerShape, Unsupported
from deft_backend.hosts.sglang import versions
from deft_backend.hosts.sglang.layers import device_of, unsupported_layer
from deft_backend.hosts.sglang.prefixes import BatchObserver, CachedTree, Observed
from deft_backend.hosts.sglang.tree_layers import LayerCall, StepLayers, TreeStep
from deft_backend.settings.config import Settings

ANSWERED_AFTER = 8
"""Batches until the costs of changed requests decide: enough time for any answer of the CPU."""


class LatentLayer(NamedTuple):
    heads: int
    value_dim: int
    rope_dim: int

    @classmethod
    def of(cls, layer: Any) -> LatentLayer:
        return cls(layer.tp_q_head_num, layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim)


def is_latent(runner: Any) -> bool:
    return type(getattr(runner, "token_to_kv_pool", None)).__name__ == "MLATokenToKVPool"


def latent_attention(
    runner: Any, largest: int, query_tokens: int, settings: Settings
) -> tuple[LatentAttention, Division[int, LayerShape]]:
    device, dtype = device_of(runner), runner.dtype
    if runner.kv_cache_dtype != dtype or runner.token_to_kv_pool.store_dtype != dtype:
        raise Unsupported(
            f"MLA over KV in {runner.kv_cache_dtype} under a model in {dtype} is not supported"
        )
    shape, division = _divided(runner)
    shaped, kernel = (shape.heads, shape[1:], dtype, device), sglang_latent_attention
    integers = torch.int64
    attention = checked_latent_attention(
        *shaped, kernel, settings, integers=integers, max_batch=largest, query_tokens=query_tokens
    )
    return attention, division


def _divided(runner: Any) -> tuple[LatentLayer, Division[int, LayerShape]]:
    found: dict[int, LatentLayer] = {}
    for layer in versions.attention_layers(runner.model):
        if layer.tp_k_head_num == 1 and layer.qk_head_dim > layer.v_head_dim:
            reason = unsupported_layer(layer, latent=True)
            if reason is not None:
                raise Unsupported(f"MLA with {reason} is not supported")
            found[layer.layer_id] = LatentLayer.of(layer)
    shapes = set(found.values())
    if len(shapes) != 1:
        raise Unsupported(f"MLA in {len(shapes)} shapes is not supported")
    shape = shapes.pop()
    held = LayerShape(shape.heads, 1, shape.value_dim + shape.rope_dim)
    return shape, Division(dict.fromkeys(sorted(found), held), {})


def sglang_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's MLA kernel, FlashAttention-3: the attention and its log-sum-exps."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    batch, values = call.batch, call.q_nope.shape[-1]
    attend: Any = flash_attn_with_kvcache
    queries = {"q": call.q_rope, "qv": call.q_nope, "cu_seqlens_q": batch.query_start}
    cache = {"k_cache": call.cache[..., values:], "v_cache": call.cache[..., :values]}
    paged = {"page_table": call.page_table, "cache_batch_idx": batch.table_rows}
    ranges = {"cache_leftpad": batch.begin, "cache_seqlens": batch.end}
    sizes = {"max_seqlen_q": call.max_query_tokens, "num_splits": call.most_splits}
    scores = {"softmax_scale": call.sm_scale, "causal": call.causal, "return_softmax_lse": True}
    out, lse, *_ = attend(**queries, **cache, **paged, **ranges, **sizes, **scores)
    return out, lse


class LatentLayers(StepLayers):
    """The layers of an MLA model; of two with one id, the one over latent vectors is ours."""

    known_arguments = ("q_rope", "k_rope")

    attention: LatentAttention

    def _layer(self) -> LatentLayer:
        shape = self.attention.shape
        return LatentLayer(shape.num_query_heads, shape.value_dim, shape.rope_dim)

    def _needs_host(self, call: LayerCall) -> bool:
        return super()._needs_host(call) or LatentLayer.of(call.layer) != self._layer()

    def _host_reason(self, call: LayerCall) -> str | None:
        return unsupported_layer(call.layer, latent=True) or self._unknown_argument(call)

    def _write_kv(self, call: LayerCall, step: TreeStep) -> None:
        k_rope = call.others.get("k_rope")
        place = step.batch.out_cache_loc
        if k_rope is None:
            self.pool.set_kv_buffer(call.layer, self._location(place, None), call.k, call.v)
        else:
            self.pool.set_mla_kv_buffer(call.layer, place, call.k, k_rope)

    def _attend(self, call: LayerCall, step: TreeStep) -> torch.Tensor:
        assert step.inputs is not None
        assert step.inputs.ancestors is None, "servers that draft trees are refused"
        heads, value_dim, rope_dim = self._layer()
        q_rope = call.others.get("q_rope")
        if q_rope is None:
            q = call.q.reshape(-1, heads, value_dim + rope_dim)
            q_nope, q_rope = q[..., :value_dim], q[..., value_dim:]
        else:
            q_nope = call.q.reshape(-1, heads, value_dim)
            q_rope = q_rope.reshape(-1, heads, rope_dim)
        rows, cache = step.inputs.rows, self.pool.get_key_buffer(call.layer.layer_id)
        # The host's page table names rows, whatever the server's page size is.
        return self.attention.run(
            q_nope[:rows],
            q_rope[:rows],
            cache.view(len(cache), 1, 1, cache.shape[-1]),
            self.page_table,
            sm_scale=call.layer.scaling,
        )


@dataclass(eq=False)
class LatentSharing:
    """Decides which batches of an MLA model share enough for a plan to gain, by the radix tree.

    A thread asks the costs, at most once when the requests change. Exactly `ANSWERED_AFTER` batches
    later its answer counts, waited for if it is late; until then the previous one does. So all
    ranks, which make the same batches, choose the same graph for each of them. A late answer costs
    time and never a token. Under a cache whose tree cannot be read, the host decodes everything.
    """

    attention: LatentAttention
    observer: BatchObserver
    num_layers: int
    _tree: CachedTree = field(
        default_factory=lambda: CachedTree("the host's kernel decodes", bigrams=True)
    )
    _log: OnceLog = field(default_factory=OnceLog)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="deft-costs")
    )
    _batch: Observed | None = None  # the last batch asked about
    _asked: Future[str | None] | None = None
    _waited: int = 0  # batches since the thread was asked
    _reason: str | None = "sharing not known yet"

    def too_little(self, forward_batch: Any) -> str | None:
        observed = self.observer.of(forward_batch)
        if observed is None:
            return "batch without requests"
        if observed is not self._batch:  # the host asks several times about one
            self._batch = observed
            try:
                self._advance(observed)
            except Exception as error:
                self._asked, self._reason = None, "planning failed"
                self._log.batch_left(error)
        return self._reason

    def _advance(self, observed: Observed) -> None:
        self._waited += 1
        if self._asked is not None and self._waited >= ANSWERED_AFTER:
            asked, self._asked = self._asked, None
            self._reason = asked.result()
        if self._asked is not None or not self._tree.changed(observed.requests):
            return
        # The tree may change after this step, so only the costs are the thread's.
        tokens = self.attention.query_tokens
        lens = np.array([request.seqlen + tokens for request in observed.requests])
        forest = self._tree.forest(observed.tree_cache, observed.requests, lens)
        if forest is None:
            self._reason = "unreadable prefix cache"
            return
        self._waited = 0
        self._asked = self._thread.submit(gains_too_little, self.attention, forest, self.num_layers)

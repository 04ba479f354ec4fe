"""Run each layer of a planned step of an MLA model: the host's kernel computes over the plan."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.attention import LatentAttention
from deft_backend.hosts.common.division import Division, LayerShape
from deft_backend.hosts.sglang.start.latent import LatentLayer
from deft_backend.hosts.sglang.start.layers import unsupported_layer
from deft_backend.hosts.sglang.step.tree_layers import LayerCall, TreeLayers, TreeStep, padded
from deft_backend.telemetry.state import ServerState


class LatentLayers(TreeLayers):
    """The layers of an MLA model. Their queries and keys come in one piece, or in two.

    A model has two attention layers of the same id: prefill uses one with the model's heads, decode
    one with the latent vectors as its KV. Only the second is ours.
    """

    known_arguments = ("q_rope", "k_rope")

    def __init__(
        self, host: Any, attention: LatentAttention, state: ServerState,
        division: Division[int, LayerShape], *, model_asks: bool,
    ) -> None:  # fmt: skip
        planned: Any = attention  # every use of what it lacks is replaced below
        super().__init__(host, planned, state, division, model_asks=model_asks)
        self._latent = attention
        shape = attention.shape
        self._layer = LatentLayer(shape.num_query_heads, shape.value_dim, shape.rope_dim)

    def begin(self, step: TreeStep) -> None:
        super().begin(step)
        self.lay_out()

    def lay_out(self) -> None:
        """Write the calls of the host's kernel for the current step, before its first layer."""
        step = self.step
        if step is None or step.inputs is None or self._latent.planned_on_device:
            return  # a plan made on the device is laid out with it
        try:
            self._latent.lay_out(step.inputs.seq_lens, table_rows=step.inputs.table_rows)
        except Exception as error:
            self.give_up(step, error)

    def _needs_host(self, call: LayerCall) -> bool:
        return super()._needs_host(call) or LatentLayer.of(call.layer) != self._layer

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
        heads, value_dim, rope_dim = self._layer
        q_rope = call.others.get("q_rope")
        if q_rope is None:
            q = call.q.reshape(-1, heads, value_dim + rope_dim)
            q_nope, q_rope = q[..., :value_dim], q[..., value_dim:]
        else:
            q_nope = call.q.reshape(-1, heads, value_dim)
            q_rope = q_rope.reshape(-1, heads, rope_dim)
        rows, cache = step.inputs.rows, self.pool.get_key_buffer(call.layer.layer_id)
        # The host's page table names rows, whatever the server's page size is.
        out = self._latent.run(
            q_nope[:rows], q_rope[:rows], cache.view(len(cache), 1, 1, cache.shape[-1]),
            self.page_table, sm_scale=call.layer.scaling,
        )  # fmt: skip
        return padded(out, len(q_nope))

"""The class around one of the host's backends, and its implementation of a layer.

They are subclasses because vLLM checks classes: FLASH_ATTN, for example, reads the windows only of
layers whose implementation is its own. They inherit names, layouts, sizes, KV writes and graphs.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch

from deft_backend.hosts.vllm.builder import TreeBuilder
from deft_backend.hosts.vllm.latent import unsupported_latent
from deft_backend.hosts.vllm.layers import Layer, layer_of
from deft_backend.hosts.vllm.step import LayerCall, TreeStep, step_of
from deft_backend.hosts.vllm.versions import has_standard_cache
from deft_backend.settings.config import Settings


@cache
def tree_backend(host: Any) -> Any:
    """The backend class that decodes through tree attention and does everything else as `host`."""

    def surrounded(ours: type, theirs: type, members: dict[str, Any]) -> type:
        return type(f"Tree{theirs.__name__}", (ours, theirs), members)

    builder = surrounded(TreeBuilder, host.get_builder_cls(), {"host": host})
    ours = LatentImplementation if host.is_mla() else TreeImplementation
    implementation = surrounded(ours, host.get_impl_cls(), {})
    members = {
        "get_builder_cls": staticmethod(lambda: builder),
        "get_impl_cls": staticmethod(lambda: implementation),
        "__doc__": f"{host.get_name()}, with tree attention for its decode batches.",
        "__module__": "deft_backend.hosts.vllm.registered",
    }
    return type(f"Tree{host.__name__}", (host,), members)


def cannot_surround(host: Any) -> str | None:
    """Why a backend of the host cannot be surrounded, in one line, or None."""
    if host.is_mla():
        return unsupported_latent(host, Settings.from_env())
    if host.is_sparse() or host.is_ssm():
        return "its attention is of another kind (sparse or state space)"
    if not has_standard_cache(host):
        return "its KV cache is not laid out as [blocks, heads, block size, 2 x head dimension]"
    if host.forward_includes_kv_cache_update:
        return "it writes the KV cache within its attention"
    return None


class TreeImplementation:
    """Placed before one of the host's ``AttentionImpl`` classes."""

    deft_layer: Layer
    scale: float  # of the scores; its value at the time of a run is the valid one
    sinks: torch.Tensor | None  # [Hq]; some hosts convert them after the weights are loaded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        host = cast(Any, super())
        host.__init__(*args, **kwargs)
        layer = layer_of(host.__init__, args, kwargs)
        if layer.sinks and getattr(self, "sinks", None) is None:
            layer = layer._replace(reason="attention sinks that the host's implementation hides")
        self.deft_layer = layer

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The host's ``AttentionImpl.forward``, except for tree attention; KV is written."""
        host_forward: Callable[..., torch.Tensor] = cast(Any, super()).forward
        step = step_of(attn_metadata)
        given = (layer, query, key, value, kv_cache, attn_metadata, output)
        if step is None:
            return host_forward(*given, *args, **kwargs)

        def host() -> torch.Tensor:
            metadata = attn_metadata if step.whole is None else step.whole()
            return host_forward(*given[:5], metadata, output, *args, **kwargs)

        # Further arguments are scales of a fused output quantisation.
        if (args or kwargs) and any(a is not None for a in (*args, *kwargs.values())):
            step.group.leave(step, "a fused output quantisation")
            return host()
        self.deft_layer = self.deft_layer.with_scales_of(layer)
        if step.picked is not None:
            host()
            rows = step.picked.tokens
            ours = output[rows]
            if self._tree_attend(
                step, query[rows], kv_cache, ours, lambda: ours.copy_(output[rows])
            ):
                output[rows] = ours
            return output
        if not self._tree_attend(step, query, kv_cache, output, host):
            return host()
        if step.whole is not None:
            return host_forward(*given, *args, **kwargs)
        if step.rest is not None:
            # A fused kernel that has written the cache leaves no keys and values.
            others = slice(step.tokens, None)
            q, k, v = (None if each is None else each[others] for each in (query, key, value))
            host_forward(layer, q, k, v, kv_cache, step.rest, output[others], *args, **kwargs)
        return output

    def _tree_attend(
        self,
        step: TreeStep,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        host: Callable[[], object],
    ) -> bool:
        """Compute the step's rows, the first ones of `output`; False if the host must."""
        if step.group.repeat(step, self, query, kv_cache, output):
            return True
        mine = self.deft_layer.scaled(float(self.scale))
        sinks = self.sinks if mine.sinks else None
        call = LayerCall(self, mine, query, output, kv_cache, sinks, host)
        return step.group.attend(step, call)


class LatentImplementation(TreeImplementation):
    """Placed before the host's implementation of MLA, which decodes in ``forward_mqa``."""

    need_to_return_lse_for_decode: bool

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [T, Hq, value_dim] and [T, Hq, rope_dim], or both in one; a result as `q`'s."""

        def host() -> tuple[torch.Tensor, torch.Tensor | None]:
            found = cast(Any, super(LatentImplementation, self)).forward_mqa(
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return cast(tuple[torch.Tensor, torch.Tensor | None], found)

        step, mine = step_of(attn_metadata), self.deft_layer.scaled(float(self.scale))
        if step is None or mine.value_dim is None:
            return host()
        if isinstance(q, tuple):
            q_nope, q_rope = q
        else:
            q_nope, q_rope = q[..., : mine.value_dim], q[..., mine.value_dim :]
        if len(q_nope) != step.tokens or self.need_to_return_lse_for_decode:
            step.group.leave(step, "a decode of other tokens than the step's, or with log-sum-exps")
            return host()
        output = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
        into, cache, sinks = lambda: output.copy_(host()[0]), kv_c_and_k_pe_cache, None
        call = LayerCall(self, mine, q_nope, output, cache, sinks, into, q_rope)
        return (output, None) if step.group.attend(step, call) else host()

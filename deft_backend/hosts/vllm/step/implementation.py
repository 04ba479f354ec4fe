"""The implementation of a layer: decode steps through tree attention, all else as the host's."""

from __future__ import annotations

from typing import Any, cast

import torch

from deft_backend.hosts.vllm.start.layers import Layer, layer_of
from deft_backend.hosts.vllm.step.step import step_of


class TreeImplementation:
    """Placed before one of the host's ``AttentionImpl`` classes; see ``compose.py``."""

    deft_layer: Layer
    scale: float
    """The host's scale of the scores; its value at the time of a run is the valid one."""
    sinks: torch.Tensor | None
    """[Hq], the host's; some implementations convert them after the weights are loaded."""

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
        """The host's ``AttentionImpl.forward``, except for decode steps of tree attention.

        The host has already written the new keys and values: no surrounded backend writes them
        here.
        """

        def host() -> torch.Tensor:
            forward = cast(Any, super(TreeImplementation, self)).forward
            return cast(
                torch.Tensor,
                forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs),
            )

        step = step_of(attn_metadata)
        if step is None:
            return host()
        # Further arguments are scales of a fused output quantisation.
        if any(a is not None for a in (*args, *kwargs.values())):
            step.leave("a fused output quantisation")
            return host()
        self.deft_layer = self.deft_layer.with_scales_of(layer)
        mine = self.deft_layer.scaled(float(self.scale))
        sinks = self.sinks if mine.sinks else None
        if step.takes(mine) and step.attend(self, mine, query, kv_cache, output, host, sinks):
            return output
        return host()

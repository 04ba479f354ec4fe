"""The implementation of a layer: a decode step through tree attention, the rest as the host's."""

from __future__ import annotations

from typing import Any, cast

import torch

from deft_backend.hosts.vllm.layers import Layer, layer_of
from deft_backend.hosts.vllm.step import step_of


class TreeImplementation:
    """Stands before one of the host's ``AttentionImpl`` classes; see ``compose.py``."""

    deft_layer: Layer
    scale: float
    """Of the host's; what it holds when a layer runs counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        host = cast(Any, super())
        host.__init__(*args, **kwargs)
        self.deft_layer = layer_of(host.__init__, args, kwargs)

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
        """The host's ``AttentionImpl.forward``, from which decode steps of the tree are taken.

        The host has written the new keys and values already: backends that write them here are
        not surrounded.
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
        # More arguments are scales of a fused output quantisation.
        if any(a is not None for a in (*args, *kwargs.values())):
            step.leave("a fused output quantisation")
            return host()
        mine = self.deft_layer.scaled(float(self.scale))
        if step.takes(mine) and step.attend(self, mine, query, kv_cache, output, host):
            return output
        return host()

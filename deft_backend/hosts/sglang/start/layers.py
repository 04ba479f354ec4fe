"""Decide for each attention layer whether tree attention can run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from deft_backend.hosts.sglang.start.caches import FullCache

Shape = tuple[int, int, int]
"""Query heads, KV heads and head dimension of a layer, on this rank."""


class Division(NamedTuple):
    """Which of a model's layers decode through tree attention, as far as the model shows it.

    A call of a layer may still bring an argument that tree attention does not know.

    Attributes
    ----------
    shape : tuple of int, optional
        Of the layers that decode through tree attention; None if there are none.
    tree : tuple of int
        Ids of these layers.
    host : mapping
        For each other layer, the reason why the host's kernel runs it.
    """

    shape: Shape | None
    tree: tuple[int, ...]
    host: Mapping[int, str]

    def text(self) -> str | None:
        """The division in one line, or None if tree attention runs every layer."""
        if not self.host:
            return None
        total = len(self.tree) + len(self.host)
        reasons = Counter(self.host.values())
        parts = [f"{count} with {reason}" for reason, count in reasons.most_common()]
        return (
            f"{len(self.tree)} of {total} layers decode through tree attention; "
            f"{', '.join(parts)} through the host's kernels"
        )


def divide_layers(
    layers: Iterable[Any],
    cache: FullCache,
    others: Iterable[int] = (),
    refused: Callable[[Shape], str | None] = lambda shape: None,
) -> Division:
    """Decide on every layer of a model.

    Layers with full attention may differ in their heads. A plan serves one shape: that of most
    layers.

    Parameters
    ----------
    layers : iterable of the host's ``RadixAttention``
    cache : FullCache
    others : iterable of int
        Ids of the model's linear and recurrent layers.
    refused : callable
        Why no kernel runs a shape, or None.
    """
    shapes: dict[int, Shape] = {}
    host: dict[int, str] = {}
    for layer in layers:
        shape = shape_of_layer(layer)
        reason = unsupported_layer(layer) or refused(shape)
        if reason is None and not cache.holds(layer.layer_id, shape):
            reason = "a KV cache of another kind"
        if reason is not None:
            host[layer.layer_id] = reason
        else:
            shapes[layer.layer_id] = shape
    planned = Counter(shapes.values()).most_common(1)[0][0] if shapes else None
    for layer_id, shape in shapes.items():
        if planned is not None and shape != planned:
            host[layer_id] = other_shape(shape, planned)
    for layer_id in others:  # a layer may have both kinds of attention side by side
        if layer_id not in shapes:
            host.setdefault(layer_id, "linear or recurrent attention")
    tree = tuple(sorted(layer_id for layer_id in shapes if layer_id not in host))
    return Division(planned, tree, host)


def shape_of_layer(layer: Any) -> Shape:
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim


def other_shape(shape: Shape, planned: Shape) -> str:
    """The reason for a layer whose heads differ from those that the plan serves."""
    return (
        f"{shape[0]} query and {shape[1]} KV heads of {shape[2]}; the model's other layers "
        f"have {planned[0]} and {planned[1]} of {planned[2]}"
    )


def unsupported_layer(layer: Any, planned: Shape | None = None) -> str | None:
    """The reason, in one line, why the host's kernel runs a ``RadixAttention`` layer; or None.

    Parameters
    ----------
    layer
    planned : tuple of int, optional
        The shape that the plan serves; None: any shape.
    """
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type.value != "decoder":
        return f"{layer.attn_type.value} attention"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "a sliding window"
    if getattr(layer, "use_irope", False):
        return "chunked local attention"
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        return f"position encoding {layer.pos_encoding_mode} inside attention"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        return "a temperature by position"
    if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        return f"{layer.logit_capping_method} capping of the scores"
    if layer.qk_head_dim != layer.v_head_dim:
        return f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim} elements"
    if layer.tp_k_head_num != layer.tp_v_head_num:
        return f"{layer.tp_k_head_num} key heads and {layer.tp_v_head_num} value heads"
    shape = shape_of_layer(layer)
    if planned is not None and shape != planned:
        return other_shape(shape, planned)
    return None

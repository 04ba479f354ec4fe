"""Decide for each attention layer whether tree attention can run it."""

from __future__ import annotations

from typing import Any


def unsupported_layer(
    layer: Any, num_query_heads: int, num_kv_heads: int, head_dim: int
) -> str | None:
    """The reason, in one line, why the host's kernel runs a ``RadixAttention`` layer; or None."""
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
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num, layer.qk_head_dim)
    if heads != (num_query_heads, num_kv_heads, num_kv_heads, head_dim):
        return (
            f"{heads[0]} query and {heads[1]} KV heads of {heads[3]}; the model's other layers "
            f"have {num_query_heads} and {num_kv_heads} of {head_dim}"
        )
    return None

"""Find the part of the host's KV cache that holds every token of each full-attention layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple


class FullCache(NamedTuple):
    """The KV cache of the layers that attend to their whole context.

    Attributes
    ----------
    pool
        The host's ``MHATokenToKVPool`` that holds these layers' keys and values.
    layers : collection of int, optional
        The model's ids of these layers; None: every layer of the model runner.
    """

    pool: Any
    layers: Collection[int] | None

    def holds(self, layer_id: int, shape: tuple[int, int, int]) -> bool:
        """Whether the page table names the pages of a layer with these heads."""
        held = self.layers is None or layer_id in self.layers
        return held and tuple(self.keys.shape[-2:]) == shape[1:]

    @property
    def keys(self) -> Any:
        """[tokens, Hkv, D]: the keys of the first layer; all layers have the same shape."""
        return self.pool.get_key_buffer(self.pool.start_layer)

    @property
    def values(self) -> Any:
        """[tokens, Hkv, D]: the values of the first layer."""
        return self.pool.get_value_buffer(self.pool.start_layer)


def full_cache(pool: Any) -> FullCache | str:
    """The full-attention part of a model runner's pool, or why tree attention cannot read it.

    - ``MHATokenToKVPool``: one pool for all layers, whatever they attend to.
    - ``SWAKVPool``: a second pool holds the layers with sliding windows, in pages of its own. The
      page table names the pages of the first pool.
    - ``HybridLinearKVPool``: linear and recurrent layers keep their state elsewhere.
    """
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        full = [layer for layer, (_, windowed) in pool.layers_mapping.items() if not windowed]
        found = FullCache(pool.full_kv_pool, frozenset(full))
    elif kind == "HybridLinearKVPool":
        found = FullCache(pool.full_kv_pool, frozenset(pool.full_attention_layer_id_mapping))
    else:
        found = FullCache(pool, None)
    inner = type(found.pool).__name__
    if inner != "MHATokenToKVPool":
        name = kind if inner == kind else f"{kind} over {inner}"
        return f"a KV cache of kind {name} is not supported"
    if found.layers is not None and not found.layers:
        return f"a KV cache of kind {kind} without full-attention layers is not supported"
    layout = getattr(found.pool, "kv_cache_layout", "nhd")
    if layout != "nhd" or getattr(found.pool, "use_hnd", False):
        return f"a KV cache in the layout {layout} is not supported"
    return found

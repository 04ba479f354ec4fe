"""Put tree attention around one of the host's backends, by three subclasses.

They are subclasses because vLLM checks classes: FLASH_ATTN, for example, reads the sliding windows
only of layers whose implementation is an instance of its own class. The subclasses inherit
everything else from the host: names, layouts, supported sizes, KV writes, graphs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from deft_backend.hosts.vllm.step.builder import TreeBuilder
from deft_backend.hosts.vllm.step.implementation import TreeImplementation
from deft_backend.hosts.vllm.versions import has_standard_cache


@cache
def tree_backend(host: Any) -> Any:
    """The backend class that decodes through tree attention and does everything else as `host`.

    Parameters
    ----------
    host : type[AttentionBackend]
        One of the host's backends whose cache passes :func:`has_standard_cache` and whose KV
        writes are not part of ``forward``; see :func:`cannot_surround`.
    """
    builder = type(
        f"Tree{host.get_builder_cls().__name__}", (TreeBuilder, host.get_builder_cls()), {}
    )
    builder.host = host  # type: ignore[attr-defined]
    implementation = type(
        f"Tree{host.get_impl_cls().__name__}", (TreeImplementation, host.get_impl_cls()), {}
    )
    members = {
        "get_builder_cls": staticmethod(lambda: builder),
        "get_impl_cls": staticmethod(lambda: implementation),
        "__doc__": f"{host.get_name()}, with tree attention for its decode batches.",
        "__module__": "deft_backend.hosts.vllm.start.registered",
    }
    return type(f"Tree{host.__name__}", (host,), members)


def cannot_surround(host: Any) -> str | None:
    """Why a backend of the host cannot be surrounded, in one line, or None."""
    if host.is_mla() or host.is_sparse() or host.is_ssm():
        return "its attention is of another kind (MLA, sparse or state space)"
    if not has_standard_cache(host):
        return "its KV cache is not laid out as [blocks, heads, block size, 2 x head dimension]"
    if host.forward_includes_kv_cache_update:
        return "it writes the KV cache within its attention"
    return None

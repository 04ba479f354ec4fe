"""``DEFT_OBSERVE``: count the decode steps of a server that runs another attention backend.

This gives the baseline of ``deft ab``: the KV that the host's kernels read, query by query.
"""

from functools import cache
from typing import Any, cast

import torch

from deft_backend.hosts.common.division import LayerShape
from deft_backend.hosts.vllm.report.server import Counted, server_of
from deft_backend.hosts.vllm.start.division import attending_layers, query_tokens_of
from deft_backend.hosts.vllm.step.step import context_tokens, is_step
from deft_backend.settings.config import Settings


def original_backend(name: str) -> Any:
    """The host's own class for a name, even if another class is registered for it."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


@cache
def observed_backend(host: Any) -> Any:
    """A backend of the host whose builder also counts decode steps."""
    builder = type(host.get_builder_cls().__name__, (ObservedBuilder, host.get_builder_cls()), {})
    builder.host = host  # type: ignore[attr-defined]
    members = {
        "get_builder_cls": staticmethod(lambda: builder),
        "__module__": "deft_backend.hosts.vllm.start.registered",
        "__qualname__": host.get_name(),
        "observed": host,
    }
    return type(host.__name__, (host,), members)


class ObservedBuilder:
    """Placed before one of the host's ``AttentionMetadataBuilder`` classes."""

    host: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any,
                 device: torch.device) -> None:  # fmt: skip
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._host().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model, place = vllm_config.model_config, vllm_config.parallel_config
        shape = LayerShape(
            model.get_num_attention_heads(place), kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
        )  # fmt: skip
        server = server_of(vllm_config)
        self._counts = self._capturing = False
        full = isinstance(kv_cache_spec, FullAttentionSpec)
        if not full and any(attending_layers(vllm_config, full=True)):
            return  # a group with full attention counts the steps
        counted = Counted(
            tuple(layer_names), shape, kv_cache_spec.dtype, torch.device(device),
            observed=self.host.get_name(),
        )  # fmt: skip
        self._state = server.count_in(counted, Settings.from_env())
        self._query_tokens = query_tokens_of(vllm_config)
        self._counts = server.counting == counted.names

    def _host(self) -> Any:
        return cast(Any, super())

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any,
              **kwargs: Any) -> Any:  # fmt: skip
        """The host's metadata; this counts a decode or a verification."""
        common = common_attn_metadata
        if self._counts and not self._capturing and is_step(common, self._query_tokens):
            self._state.count_host("observed", context_tokens(common))
        return self._host().build(common_prefix_len, common, *args, **kwargs)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of a batch made for capture, which is not counted."""
        self._capturing = True
        try:
            return self._host().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

"""A backend of vLLM for servers on the CPU: the standard KV layout, with PyTorch's own attention.

No other kernel can read the cache of vLLM's CPU_ATTN, which packs keys for vector instructions.
With this backend a server on the CPU runs the same adapter and kernels as one on a GPU. It is exact
and not fast. :func:`install` is the entry point of a plugin of vLLM.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from vllm import envs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backend import MultipleOf as _MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from deft_backend.hosts.vllm.layers import kv_views
from deft_backend.hosts.vllm.versions import is_ours, refuse
from deft_backend.shapes import EIGHT_BIT_CACHES


def install():
    """Replace the CPU platform's only backend in servers that ask for tree attention."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.CPU_ATTN")
    if envs.VLLM_BATCH_INVARIANT:
        compute_row_by_row()


def compute_row_by_row():
    """Stand in for the kernels of vLLM's batch-invariant mode, which need a GPU."""
    from vllm.model_executor.determinism import batch_invariant
    from vllm.model_executor.layers import utils

    def linear(x, weight, bias):
        rows = [functional.linear(row, weight, bias) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).reshape(*x.shape[:-1], -1)

    batch_invariant.init_batch_invariance = lambda: None
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: vars(layer).update(
        cpu_linear=linear
    )


def original_backend(name):
    """The host's own class for a name, even if another class is registered for it."""
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


def __getattr__(name):
    """The class that vLLM resolves; the server's configuration decides, once that is known."""
    from vllm.config import get_current_vllm_config_or_none

    from deft_backend.hosts.vllm.backend import tree_backend

    if name != "CPU_ATTN":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    if config is None or not is_ours(config.attention_config.backend) or refuse():
        return original_backend(name)
    return tree_backend(PlainCpuBackend)


class PlainCpuBackend(AttentionBackend):
    """Paged decoder attention in PyTorch, over ``[blocks, Hkv, block_size, 2 * D]``."""

    forward_includes_kv_cache_update = False
    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = ("auto", *EIGHT_BIT_CACHES)

    @staticmethod
    def get_name():
        return "CPU_ATTN"  # the host finds its backends by their names

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [_MultipleOf(16)]

    @staticmethod
    def get_impl_cls():
        return PlainCpuImplementation

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        """To 0.28, as the next one: newer versions resolve a layout without the backend."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if include_num_layers_dimension:
            raise NotImplementedError("layers lie one after the other in this backend's cache")
        return (0, 2, 1, 3) if get_kv_cache_layout() == "NHD" else (0, 1, 2, 3)

    @staticmethod
    def get_builder_cls():
        return PlainCpuBuilder

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_batch_invariance(cls):
        return True


@dataclass
class PlainCpuMetadata:
    query_start_loc: torch.Tensor  # [B + 1] int32: first query token of each request
    seq_lens: torch.Tensor  # [B] int32: tokens of each request, including those of this step
    block_table: torch.Tensor  # [B, P] int32


class PlainCpuBuilder(AttentionMetadataBuilder):
    """Passes the batch on as metadata."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)  # abstract in the base class

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        assert common.causal is True
        return PlainCpuMetadata(common.query_start_loc, common.seq_lens, common.block_table_tensor)


class PlainCpuImplementation(AttentionImpl):
    """One layer: writes its keys and values, then attends over the pages of each request."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        sinks=None,
    ):
        eight_bits = EIGHT_BIT_CACHES.get(kv_cache_dtype)
        self._kv_dtype = None if eight_bits is None else getattr(torch, eight_bits)
        assert (getattr(attn_type, "value", attn_type), alibi_slopes) == ("decoder", None)
        assert kv_cache_dtype in ("auto", *EIGHT_BIT_CACHES)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._window = sliding_window
        self._cap = float(logits_soft_cap or 0.0)
        self.sinks = sinks

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        """Attention of every query token over the pages of its request, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("no fused output quantisation")
        if attn_metadata is None:  # the host's profiling run
            return output
        k_cache, v_cache = self._views(kv_cache)
        page_size = k_cache.shape[1]
        starts = attn_metadata.query_start_loc.tolist()
        for row, tokens in enumerate(attn_metadata.seq_lens.tolist()):
            begin, end = starts[row], starts[row + 1]
            if begin == end or not tokens:
                continue
            pages = attn_metadata.block_table[row, : -(-tokens // page_size)].long()
            k = k_cache[pages].flatten(0, 1)[:tokens]
            v = v_cache[pages].flatten(0, 1)[:tokens]
            if self._kv_dtype is not None:
                k = k.to(query.dtype) * float(layer._k_scale)
                v = v.to(query.dtype) * float(layer._v_scale)
            step = 1 if envs.VLLM_BATCH_INVARIANT else end - begin
            for first in range(begin, end, step):
                seen = tokens - (end - first - step)
                rows = slice(first, first + step)
                output[rows] = self._attend(query[rows], k[:seen], v[:seen])
        return output

    def _attend(self, q, k, v):
        """Causal attention of the last tokens of a request: [t, Hq, D] over [n, Hkv, D]."""
        tokens, queries = len(k), len(q)
        group = self.num_heads // self.num_kv_heads
        grouped = q.reshape(queries, self.num_kv_heads, group, self.head_size)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k).float() * self.scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        position = torch.arange(tokens - queries, tokens)[:, None]
        other = torch.arange(tokens)[None, :]
        hidden = other > position
        if self._window is not None:
            hidden |= other <= position - self._window
        scores.masked_fill_(hidden, float("-inf"))
        if self.sinks is not None:  # one more column of scores, without a value
            sinks = self.sinks.float().view(self.num_kv_heads, group, 1, 1)
            scores = torch.cat((scores, sinks.expand(-1, -1, queries, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :tokens]
        return torch.einsum("hgqk,khd->qhgd", weights.to(v.dtype), v).reshape(q.shape)

    def _views(self, kv_cache):
        """Keys and values; the host gives numbers of 8 bits as bytes."""
        if self._kv_dtype is not None:
            kv_cache = kv_cache.view(self._kv_dtype)
        return kv_views(kv_cache, self.head_size)

    def _stored(self, new, scale):
        """Keys or values as the cache holds them; what is too large becomes the largest number."""
        if self._kv_dtype is None:
            return new
        most = torch.finfo(self._kv_dtype).max
        return (new.float() / float(scale)).clamp(-most, most).to(self._kv_dtype)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Write new keys and values [T, Hkv, D] to their slots; a slot of -1 is padding."""
        k_cache, v_cache = self._views(kv_cache)
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        page, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
        k_cache[page, offset] = self._stored(key[: len(kept)][kept], layer._k_scale)
        v_cache[page, offset] = self._stored(value[: len(kept)][kept], layer._v_scale)

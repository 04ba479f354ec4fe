"""Stand-ins for peers' packages: they compute the planned attention in float64."""

import math
from types import ModuleType, SimpleNamespace

import torch

Tensor = torch.Tensor


def attend(q, k, v):
    """Attention of q [n, Hq, D] over all of k, v [t, Hkv, D], with its log-sum-exp [n, Hq]."""
    n, heads, dim = q.shape
    if len(k) == 0:
        return torch.zeros(n, heads, dim, dtype=torch.float64), torch.full((n, heads), -math.inf)
    grouped = q.double().view(n, k.shape[1], -1, dim)
    scores = torch.einsum("nhgd,thd->nhgt", grouped, k.double()) / math.sqrt(dim)
    out = torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), v.double())
    return out.reshape(n, heads, dim), scores.logsumexp(-1).reshape(n, heads)


def gathered(cache, pages, tokens):
    """The first `tokens` tokens of `pages`, [tokens, Hkv, D]."""
    return cache[pages.long()].flatten(0, 1)[:tokens]


def check_scales(q, k, v, scales):
    """FlashAttention-3 takes one dtype, and scales with 8 bits."""
    assert q.dtype == k.dtype == v.dtype
    names = {"q_descale", "k_descale", "v_descale"} if k.itemsize == 1 else set()
    assert set(scales) == names
    assert all(scale.shape == (len(q), k.shape[2]) for scale in scales.values())


class Groups:
    """Queries in contiguous groups, each over its own pages, in FlashInfer's format."""

    def __init__(self, qo, indptr, indices, last, size):
        for values in (qo, indptr, indices, last):
            assert values.dtype == torch.int32
        assert len(qo) == len(indptr) == len(last) + 1
        assert int(indptr[-1]) == len(indices)
        self.groups = list(
            zip(qo.tolist(), qo.tolist()[1:], indptr.tolist(), indptr.tolist()[1:],
                last.tolist(), strict=False)
        )  # fmt: skip
        self.indices, self.size, self.batch = indices, size, int(qo[-1])

    def run(self, q, cache):
        assert len(q) == self.batch
        outs, lses = [], []
        for first, end, page, stop, last in self.groups:
            pages = self.indices[page:stop]
            tokens = max(0, stop - page - 1) * self.size + last
            assert bool(tokens) == bool(len(pages))
            out, lse = attend(q[first:end], *(gathered(part, pages, tokens) for part in cache))
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


class DecodeWrapper:
    """``flashinfer.BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(self, workspace, layout, *, use_tensor_cores, backend):
        assert (layout, use_tensor_cores) == ("NHD", True)
        assert backend in ("auto", "fa2")

    def plan(
        self, indptr, indices, last, query_heads, kv_heads,
        head_dim, page_size, *, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        self.kv_dtype = kv_data_type
        self.shape = (query_heads, kv_heads, head_dim)
        one_each = torch.arange(len(last) + 1, dtype=torch.int32)
        self.planned = Groups(one_each, indptr, indices, last, page_size)

    def run(self, q, cache, *, out):
        assert (q.shape[1], cache[0].shape[2], q.shape[2]) == self.shape
        assert cache[0].dtype == cache[1].dtype == self.kv_dtype
        return out.copy_(self.planned.run(q, cache)[0])


class CascadeWrapper:
    """``flashinfer.MultiLevelCascadeAttentionWrapper``, merging in its order."""

    def __init__(self, levels, workspace, layout):
        assert layout == "NHD"
        self.levels = levels

    def plan(self, *arguments, q_data_type, kv_data_type):
        *arrays, self.query_heads, self.kv_heads, self.head_dim, page_size = arguments
        assert all(len(values) == self.levels for values in arrays)
        self.planned = [Groups(*level, page_size) for level in zip(*arrays, strict=True)]

    def run(self, q, cache):
        assert q.shape[1:] == (self.query_heads, self.head_dim)
        assert cache[0].shape[2] == self.kv_heads
        out, lse = self.planned[-1].run(q, cache)
        for level in self.planned[:-1]:
            other, other_lse = level.run(q, cache)
            both = torch.logaddexp(lse, other_lse)
            out = out * (lse - both).exp()[..., None] + other * (other_lse - both).exp()[..., None]
            lse = both
        return out.to(q.dtype)


FLASHINFER = SimpleNamespace(
    __version__="0",
    BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    MultiLevelCascadeAttentionWrapper=CascadeWrapper,
)


class VllmFlashAttention(ModuleType):
    """``vllm.vllm_flash_attn.flash_attn_interface``."""

    def get_scheduler_metadata(self, **arguments):
        assert arguments["causal"]
        assert arguments["num_splits"] == 0
        return arguments["num_heads_q"], arguments["num_heads_kv"], arguments["headdim"]

    def flash_attn_varlen_func(
        self, q, k, v, *, max_seqlen_q, cu_seqlens_q,
        max_seqlen_k, seqused_k, block_table, causal, out,
        fa_version, scheduler_metadata = (), num_splits = 0,
        **scales,
    ):  # fmt: skip
        check_scales(q, k, v, scales)
        assert (max_seqlen_q, num_splits, causal) == (1, 0, True)
        made = (q.shape[1], k.shape[2], q.shape[2])
        assert scheduler_metadata == {2: (), 3: made}[fa_version]
        assert cu_seqlens_q.tolist() == list(range(len(q) + 1))
        assert max_seqlen_k == int(seqused_k.max())
        for row, tokens in enumerate(seqused_k.tolist()):
            pages = block_table[row, : -(-tokens // k.shape[1])]
            kv = (gathered(part, pages, tokens) for part in (k, v))
            out[row] = attend(q[row : row + 1], *kv)[0][0]
        return out


class SglangFlashAttention(ModuleType):
    """``sgl_kernel.flash_attn``."""

    def flash_attn_with_kvcache(self, q, k, v, *, cache_seqlens, page_table, causal, out, **scales):
        check_scales(q, k, v, scales)
        assert causal
        assert q.shape[1] == out.shape[1] == 1
        for row, tokens in enumerate(cache_seqlens.tolist()):
            pages = page_table[row, : -(-tokens // k.shape[1])]
            kv = (gathered(part, pages, tokens) for part in (k, v))
            out[row] = attend(q[row], *kv)[0]
        return out

"""Let real SGLang servers speculate on a machine without a GPU: a plugin of SGLang.

SGLang's wheel for GPUs lacks the operations of its CPU engine. The host's own Triton kernels for
token trees and places run in Triton's interpreter instead. Attention, and two operations without
such a kernel, have stand-ins in PyTorch. The package that users install does not contain this file.
"""

import ctypes
from importlib import import_module
from types import SimpleNamespace

import torch

from deft_backend.hosts.common.contract import version_key
from deft_backend.settings.version import installed_version

REGISTER = f"{__name__}:register"
"""The target of the plugin's entry point."""

SINCE = "0.5.23"

KERNELS = [
    "sglang.srt.mem_cache.allocation",
    *(
        f"sglang.kernels.ops.speculative.{name}"
        for name in ("cache_locs", "eagle", "multi_layer_eagle", "reconstruct_tree", "spec_tree")
    ),
]
"""Modules that choose between a Triton kernel and an operation of the CPU engine."""


def unusable():
    """Why the installed SGLang cannot use the stand-ins, or None."""
    found = installed_version("sglang")
    if found is None or version_key(found) >= version_key(SINCE):
        return None
    return f"the stand-ins have the signatures of SGLang {SINCE}; this is {found}"


def register():
    """Choose kernels; let the host choose its backend for CPUs with AMX, which has operations."""
    import sgl_kernel  # noqa: F401
    import sglang.srt.arg_groups.overrides as overrides

    for operation in OPERATIONS:
        setattr(torch.ops.sgl_kernel, operation.__name__, operation)
    for module in map(import_module, KERNELS):
        module._is_cpu, module._is_xpu = False, True  # of the GPUs with kernels in Triton alone
    real = overrides.get_platform
    overrides.get_platform = lambda: _WithAmx(real())


class _WithAmx:
    """The host's platform, with AMX."""

    has_amx = True

    def __init__(self, platform):
        self._platform = platform

    def __getattr__(self, name):
        return getattr(self._platform, name)


def build_draft_decode_metadata_cpu(
    req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len
):
    """A page table with a row for each branch: the request's tokens, then the branch's drafts."""
    rows = torch.zeros((len(seq_lens) * topk, pool_len), dtype=req_to_token.dtype)
    for request, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        for branch in range(topk):
            held = rows[request * topk + branch]
            held[:length] = req_to_token[row, :length]
            begin = length + branch * num_steps
            drafts = req_to_token[row, begin : begin + num_steps]
            held[length : length + len(drafts)] = drafts
    return rows


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy tokens between places in every buffer, each of which is read before it is written."""
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + place * size, size) for place in src_loc.tolist()]
        for place, content in zip(tgt_loc.tolist(), held, strict=True):
            ctypes.memmove(base + place * size, content, size)


_LAST = "scale cap is_cross window encoder_lens sinks"
_EXTEND = f"q k v out keys values k_scale v_scale pages rows lens tokens starts most {_LAST}"
_EXTEND += " mask causal"
_DECODE = f"q keys values k_scale v_scale out k v places logits pages rows lens {_LAST}"


def _named(names, given):
    return SimpleNamespace(**dict(zip(names.split(), given, strict=True)))


def extend_attention_cpu(*given):
    """Each request's last tokens attend to its tokens; the cache holds the new ones already."""
    at = _named(_EXTEND, given)
    assert (at.is_cross, at.causal, at.window, at.sinks) == (False, True, 0, None)
    for request, length in enumerate(at.lens.tolist()):
        tokens, start = int(at.tokens[request]), int(at.starts[request])
        before = length - tokens
        seen = torch.arange(length)[None] <= torch.arange(before, length)[:, None]
        if at.mask is not None:
            masks = at.mask.reshape(-1)[: len(at.lens) * tokens * tokens]
            seen[:, before:] = masks.view(-1, tokens, tokens)[request].bool()
        _attend(at, request, slice(start, start + tokens), seen)


def decode_attention_cpu(*given):
    """Write the new keys and values; then each request's last token attends to its tokens."""
    at = _named(_DECODE, given)
    assert (at.is_cross, at.window, at.sinks) == (False, 0, None)
    if at.k is not None and at.v is not None:
        at.keys[at.places] = at.k.view(-1, *at.keys.shape[1:])
        at.values[at.places] = at.v.view(-1, *at.values.shape[1:])
    for request, length in enumerate(at.lens.tolist()):
        seen = torch.ones((1, length), dtype=torch.bool)
        _attend(at, request, slice(request, request + 1), seen)


def _attend(at, request, rows, seen):
    """Some query tokens of a request; `seen` [t, n]: which of its n tokens each of them sees."""
    places = at.pages[at.rows[request], : seen.shape[1]].long()
    q, k, v = at.q[rows], at.keys[places], at.values[places]
    tokens, heads, dim = q.shape
    grouped = q.view(tokens, k.shape[1], heads // k.shape[1], dim).float()
    scores = torch.einsum("thgd,nhd->thgn", grouped, k.float()) * at.scale
    if at.cap > 0.0:
        scores = at.cap * torch.tanh(scores / at.cap)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    at.out[rows] = torch.einsum("thgn,nhd->thgd", weights, v.float()).flatten(1, 2).to(q.dtype)


OPERATIONS = (
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    extend_attention_cpu,
    decode_attention_cpu,
)

"""Let SGLang speculate on the CPU: operations that its CUDA wheel declares and does not hold.

The wheel for CPUs holds them, for machines with AMX. These are plain PyTorch, written for the tests
and not fast. Servers load them as a plugin (:func:`write_plugin`), so they hold for the host's own
backend and for ours.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

QLEN_ONLY = 1
"""The host's number for masks of draft tokens alone."""


def write_plugin(folder: Path) -> None:
    """Write what makes :func:`register` a plugin of servers with `folder` in ``PYTHONPATH``."""
    metadata = folder / "cpu_speculation-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-speculation\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\ncpu_speculation = {__name__}:register\n"
    )


def register() -> None:
    """Add the operations, and keep the backend that can verify on the CPU."""
    import sgl_kernel  # noqa: F401  # makes the namespace
    import sglang.srt.arg_groups.overrides as overrides

    for operation in OPERATIONS:
        setattr(torch.ops.sgl_kernel, operation.__name__, operation)
    platform = overrides.get_platform

    class WithAmx:
        """Without AMX the host takes a backend that cannot verify."""

        has_amx = True

        def __getattr__(self, name: str) -> Any:
            return getattr(platform(), name)

    overrides.get_platform = WithAmx


# Trees ---------------------------------------------------------------------------------------


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor, selected: torch.Tensor, lens: torch.Tensor, mask: torch.Tensor,
    positions: torch.Tensor, index: torch.Tensor, child: torch.Tensor, sibling: torch.Tensor,
    topk: int, depth: int, tokens: int, mode: int,
) -> None:  # fmt: skip
    """Masks, positions and links of the trees that the draft model chose.

    `selected` [B, n - 1] numbers the chosen drafts: those of step ``s`` come after the `topk` of
    the first step. ``parents[:, number // topk]`` is the number of a draft's parent.
    """
    assert mode == QLEN_ONLY, f"mask of kind {mode}"
    requests = len(lens)
    masks = mask.view(-1)[: requests * tokens**2].view(requests, tokens, tokens).zero_()
    for request in range(requests):
        chosen = selected[request].tolist()
        above = [-1] * tokens
        for token, number in enumerate(chosen, start=1):
            group = number // topk
            above[token] = 1 + chosen.index(int(parents[request, group])) if group else 0
        _fill_tree(
            above, request, int(lens[request]), masks[request], positions.view(-1, tokens), index,
            child, sibling,
        )  # fmt: skip


def reconstruct_indices_from_tree_mask_cpu(
    mask: torch.Tensor, lens: torch.Tensor, positions: torch.Tensor, index: torch.Tensor,
    child: torch.Tensor, sibling: torch.Tensor, requests: int, tokens: int,
) -> None:  # fmt: skip
    """Positions and links of the trees behind n-gram masks."""
    masks = mask.view(-1)[: requests * tokens**2].view(requests, tokens, tokens)
    for request in range(requests):
        above = [
            max((a for a in range(token) if masks[request, token, a]), default=-1)
            for token in range(tokens)
        ]
        _fill_tree(
            above, request, int(lens[request]), None, positions.view(-1, tokens), index, child,
            sibling,
        )  # fmt: skip


def _fill_tree(
    above: list[int], request: int, length: int, mask: torch.Tensor | None,
    positions: torch.Tensor, index: torch.Tensor, child: torch.Tensor, sibling: torch.Tensor,
) -> None:  # fmt: skip
    """Write one request's tree; `above` holds each token's parent."""
    tokens = len(above)
    index = index.view(-1, tokens)[request]
    child, sibling = (links.view(-1, tokens)[request] for links in (child, sibling))
    child.fill_(-1)
    sibling.fill_(-1)
    for token in reversed(range(tokens)):
        index[token] = request * tokens + token
        place, depth = token, -1
        while place >= 0:
            if mask is not None:
                mask[token, place] = True
            place, depth = above[place], depth + 1
        positions[request, token] = length + depth
        if above[token] >= 0:
            sibling[token] = child[above[token]]
            child[above[token]] = token


def verify_tree_greedy_cpu(
    predicts: torch.Tensor, accept_index: torch.Tensor, accepted: torch.Tensor,
    candidates: torch.Tensor, index: torch.Tensor, child: torch.Tensor, sibling: torch.Tensor,
    target: torch.Tensor,
) -> None:  # fmt: skip
    """Follow each tree from its root, along the drafts that the target predicts."""
    best = target.reshape(-1).tolist()
    for request in range(len(candidates)):
        token, path = 0, [int(index[request, 0])]
        while len(path) < accept_index.shape[1]:
            place = int(child[request, token])
            while place >= 0 and int(candidates[request, place]) != best[path[-1]]:
                place = int(sibling[request, place])
            if place < 0:
                break
            token = place
            path.append(int(index[request, token]))
        for place, row in enumerate(path):
            accept_index[request, place] = row
            predicts[row] = best[row]
        accepted[request] = len(path) - 1


# Page tables and lists of slots --------------------------------------------------------------


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    slots: torch.Tensor, width: int,
) -> None:  # fmt: skip
    """Write slots into the page table, one request's after another's."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[taken : taken + last - first].to(table.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    slots: torch.Tensor, width: int,
) -> None:  # fmt: skip
    """Read slots from the page table, one request's after another's."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        slots[taken : taken + last - first] = table[row, first:last].to(slots.dtype)
        taken += last - first


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor, width: int,
    topk: int, steps: int,
) -> None:  # fmt: skip
    """The slots of each request's drafts: `topk` branches of `steps` tokens."""
    assign_extend_cache_locs_cpu(rows, table, lens, lens + topk * steps, slots.view(-1), width)


def build_draft_decode_metadata_cpu(
    table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, topk: int, steps: int, width: int
) -> torch.Tensor:
    """A page table with a row for each branch: the request's context, then the branch's drafts."""
    found = torch.zeros((len(rows) * topk, width), dtype=table.dtype)
    for request, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        for branch in range(topk):
            own = table[row, length + branch * steps : length + (branch + 1) * steps]
            place = request * topk + branch
            found[place, :length] = table[row, :length]
            found[place, length : length + len(own)] = own
    return found


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lens: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    """The last token that each request accepted."""
    last = torch.arange(len(lens)) * stride + lens - 1
    bonus.view(-1)[: len(lens)] = tokens.view(-1)[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor
) -> None:
    """The slots of accepted tokens, in order."""
    rows = accept_index.reshape(-1)
    rows = rows[rows >= 0].long()
    accepted[: len(rows)] = slots[rows].to(accepted.dtype)


def rotate_input_ids_cpu(
    ids: torch.Tensor, start: torch.Tensor, lens: torch.Tensor, new: torch.Tensor,
    place: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Shift each request's tokens by one to the left, and add its new token."""
    added = new.reshape(-1)
    for request, (first, length) in enumerate(zip(start.tolist(), lens.tolist(), strict=True)):
        if length:
            ids[first : first + length - 1] = ids[first + 1 : first + length].clone()
            last = first + length - 1 if place is None else int(place[request])
            ids[last] = added[request]


def copy_all_layer_kv_cache_cpu(
    buffers: torch.Tensor, strides: torch.Tensor, to: torch.Tensor, source: torch.Tensor
) -> None:
    """Move tokens to other slots, in all buffers; `strides` are bytes of a token."""
    for address, size in zip(buffers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in source.tolist()]
        for slot, row in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


# Attention -----------------------------------------------------------------------------------


def extend_attention_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, k_scale: float, v_scale: float, table: torch.Tensor, rows: torch.Tensor,
    lens: torch.Tensor, query_lens: torch.Tensor, starts: torch.Tensor, longest: int, scale: float,
    cap: float, cross: bool, window: int, encoder_lens: Any, sinks: Any, tree: torch.Tensor | None,
    causal: bool,
) -> None:  # fmt: skip
    """Attention of the last tokens of each request: causal, or by a mask of draft tokens."""
    _check_plain(cross, window, cap, sinks)
    assert causal
    for request, length in enumerate(lens.tolist()):
        count, first = int(query_lens[request]), int(starts[request])
        seen = torch.ones((count, length), dtype=torch.bool).tril(length - count)
        if tree is not None:
            masks = tree.reshape(-1)[request * count**2 : (request + 1) * count**2]
            seen[:, length - count :] = masks.view(count, count).bool()
        slots = table[rows[request], :length].long()
        out[first : first + count] = _attention(
            q[first : first + count], keys[slots], values[slots], seen, scale
        )


def decode_attention_cpu(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, k_scale: float, v_scale: float,
    out: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, slots: torch.Tensor,
    partial: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor,
    scale: float, cap: float, cross: bool, window: int, encoder_lens: Any, sinks: Any,
) -> None:  # fmt: skip
    """Write the new token's keys and values; attention of each request's last token."""
    _check_plain(cross, window, cap, sinks)
    if k is not None and v is not None:
        keys[slots] = k.view(-1, *keys.shape[1:])
        values[slots] = v.view(-1, *values.shape[1:])
    for request, length in enumerate(lens.tolist()):
        own = table[rows[request], :length].long()
        seen = torch.ones((1, length), dtype=torch.bool)
        out[request : request + 1] = _attention(
            q[request : request + 1], keys[own], values[own], seen, scale
        )


def _check_plain(cross: bool, window: int, cap: float, sinks: Any) -> None:
    features = {"cross attention": cross, "window": window, "soft cap": cap, "sinks": sinks}
    used = [name for name, value in features.items() if value]
    assert not used, used


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """[t, Hq, D] over [n, Hkv, D], where `seen` [t, n]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.float(), k) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, v).to(q.dtype)


OPERATIONS = (
    build_tree_kernel_efficient_cpu, reconstruct_indices_from_tree_mask_cpu, verify_tree_greedy_cpu,
    assign_req_to_token_pool_cpu, assign_extend_cache_locs_cpu,
    assign_draft_cache_locs_contiguous_cpu, build_draft_decode_metadata_cpu, fill_bonus_tokens_cpu,
    fill_accept_out_cache_loc_cpu, rotate_input_ids_cpu, copy_all_layer_kv_cache_cpu,
    extend_attention_cpu, decode_attention_cpu,
)  # fmt: skip

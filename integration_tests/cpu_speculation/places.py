"""Where tokens lie: page tables, the places of drafts, and accepted tokens that move."""

import ctypes

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Write new places into page tables: `assign_req_to_token_pool`."""
    for row, start, end, first in _ranges(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start].to(
            req_to_token.dtype
        )


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Read places from page tables, one request behind another: `assign_extend_cache_locs`."""
    for row, start, end, first in _ranges(req_pool_indices, start_offset, end_offset):
        out_cache_loc[first : first + end - start] = req_to_token[row, start:end]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """Each request's next places, for all drafts: `assign_draft_cache_locs_contiguous`."""
    ends = seq_lens + topk * num_steps
    flat = out_cache_loc.view(-1)
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, flat, pool_len)


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


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request: `fill_bonus_tokens`."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.view(-1)[: len(last)] = accept_tokens.view(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The places of accepted tokens, without gaps: `fill_accept_out_cache_loc`."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None
):
    """Shift each request's tokens by one and append a new one: `rotate_input_ids_kernel`."""
    new = topk_index.reshape(-1)
    for request, (start, tokens) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if tokens > 0:
            last = start + tokens - 1
            input_ids[start:last] = input_ids[start + 1 : last + 1].clone()
            input_ids[last if select_index is None else int(select_index[request])] = new[request]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy tokens between places in every buffer: `copy_all_layer_kv_cache_tiled`.

    A place may be read and written; each buffer is read before it is written.
    """
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + place * size, size) for place in src_loc.tolist()]
        for place, content in zip(tgt_loc.tolist(), held, strict=True):
            ctypes.memmove(base + place * size, content, size)


def _ranges(rows, starts, ends):
    """Row, start, end, and the number of tokens in the ranges before this one."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, first
        first += end - start

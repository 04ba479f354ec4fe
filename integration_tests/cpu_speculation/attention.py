"""The attention of SGLang's backend for CPUs, `intel_amx`, in PyTorch and float32."""

import torch


def extend_attention_cpu(
    q,
    k,
    v,
    out,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_extend_len,
    sm_scale,
    logit_cap,
    is_cross,
    window,
    encoder_lens,
    sinks,
    tree_mask,
    causal,
):
    """Each request's last tokens attend to its tokens; the cache holds the new ones already."""
    assert (is_cross, causal, window, sinks) == (False, True, 0, None)
    for request, length in enumerate(seq_lens.tolist()):
        tokens, start = int(extend_seq_lens[request]), int(extend_start_loc[request])
        places = req_to_token[req_pool_indices[request], :length].long()
        before = length - tokens
        seen = torch.arange(length)[None] <= torch.arange(before, length)[:, None]
        if tree_mask is not None:
            masks = tree_mask.reshape(-1)[: len(seq_lens) * tokens * tokens]
            seen[:, before:] = masks.view(-1, tokens, tokens)[request].bool()
        rows = slice(start, start + tokens)
        out[rows] = _attend(q[rows], k_buffer[places], v_buffer[places], seen, sm_scale, logit_cap)


def decode_attention_cpu(
    q,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    out,
    k,
    v,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross,
    window,
    encoder_lens,
    sinks,
):
    """Write the new keys and values; then each request's last token attends to its tokens."""
    assert (is_cross, window, sinks) == (False, 0, None)
    if k is not None and v is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:])
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:])
    for request, length in enumerate(seq_lens.tolist()):
        places = req_to_token[req_pool_indices[request], :length].long()
        seen = torch.ones((1, length), dtype=torch.bool)
        row = slice(request, request + 1)
        out[row] = _attend(q[row], k_buffer[places], v_buffer[places], seen, sm_scale, logit_cap)


def _attend(q, k, v, seen, scale, cap):
    """[t, Hq, Dv] over [n, Hkv, D] and [n, Hkv, Dv]; `seen` [t, n]: what a query token sees."""
    tokens, heads, dim = q.shape
    grouped = q.view(tokens, k.shape[1], heads // k.shape[1], dim).float()
    scores = torch.einsum("thgd,nhd->thgn", grouped, k.float()) * scale
    if cap > 0.0:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("thgn,nhd->thgd", weights, v.float()).flatten(1, 2).to(q.dtype)

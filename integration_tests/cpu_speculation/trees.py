"""Token trees: how drafts become trees, and which drafts a greedy verification accepts."""

import torch

QUERY_TOKENS_ONLY = 1
"""The host's mask mode on the CPU: a mask holds the query tokens, not the context."""


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """EAGLE's trees, as `sgl_build_tree_kernel_efficient_triton` builds them.

    A draft model proposes `topk` children of each of `topk` tokens in every step. The host keeps
    the likeliest proposals; `selected_index` [B, n - 1] holds their numbers.
    """
    assert tree_mask_mode == QUERY_TOKENS_ONLY, tree_mask_mode
    for request, length in enumerate(verified_seq_len.tolist()):
        chosen = selected_index[request].tolist()
        proposed = parent_list[request].tolist() if parent_list.numel() else []
        parents = [-1]
        for number in chosen:
            group = number // topk
            parents.append(chosen.index(proposed[group]) + 1 if group else 0)
        _write(
            request,
            length,
            parents,
            positions,
            retrive_index,
            retrive_next_token,
            retrive_next_sibling,
        )
        mask = tree_mask.view(-1, draft_token_num, draft_token_num)[request]
        for token in range(draft_token_num):
            mask[token] = False
            mask[token, _path(parents, token)] = True


def reconstruct_indices_from_tree_mask_cpu(
    tree_mask,
    verified_seq_len,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    batch_size,
    draft_token_num,
):
    """Links of n-gram trees from their masks [B, n, n]: a parent is the last ancestor."""
    masks = tree_mask.view(-1, draft_token_num, draft_token_num)[:batch_size].bool()
    for request, length in enumerate(verified_seq_len.tolist()):
        parents = []
        for token in range(draft_token_num):
            ancestors = masks[request, token, :token].nonzero().flatten().tolist()
            parents.append(ancestors[-1] if ancestors else -1)
        _write(
            request,
            length,
            parents,
            positions,
            retrive_index,
            retrive_next_token,
            retrive_next_sibling,
        )


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Accept the path of drafts that the target predicts: `verify_tree_greedy_kernel_triton`."""
    tokens = candidates.shape[1]
    predicted = target_predict.reshape(-1)
    for request in range(len(candidates)):
        child = retrive_next_token[request].tolist()
        sibling = retrive_next_sibling[request].tolist()
        path = [0]
        while len(path) < accept_index.shape[1]:
            wanted = int(predicted[request * tokens + path[-1]])
            token = child[path[-1]]
            while token != -1 and int(candidates[request, token]) != wanted:
                token = sibling[token]
            if token == -1:
                break
            path.append(token)
        rows = retrive_index[request, path]
        accept_index[request, : len(path)] = rows
        accept_token_num[request] = len(path) - 1
        predicts[rows.long()] = predicted[rows.long()].to(predicts.dtype)


def _write(
    request, length, parents, positions, retrive_index, retrive_next_token, retrive_next_sibling
):
    """Positions and links of one request's tree; its siblings are in ascending order."""
    tokens = len(parents)
    child, sibling = [-1] * tokens, [-1] * tokens
    for token in range(tokens - 1, 0, -1):
        if parents[token] >= 0:
            sibling[token] = child[parents[token]]
            child[parents[token]] = token
    first = request * tokens
    depths = [length + len(_path(parents, token)) - 1 for token in range(tokens)]
    positions.view(-1)[first : first + tokens] = torch.tensor(depths)
    retrive_index.view(-1, tokens)[request] = torch.arange(first, first + tokens)
    retrive_next_token.view(-1, tokens)[request] = torch.tensor(child)
    retrive_next_sibling.view(-1, tokens)[request] = torch.tensor(sibling)


def _path(parents, token):
    """A token and its ancestors."""
    path = []
    while token >= 0:
        path.append(token)
        token = parents[token]
    return path

"""FlashAttention-3 as its authors define it, in float64: what the hosts' calls for MLA ask for."""

import re

import torch

from deft_backend.kernels.latent import KernelBatch, LatentCall, plain_latent_attention

FORWARD = re.findall(
    r"\w+",
    """
    q k v k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k
    max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin
    seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_left window_right
    softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin s_aux
    cp_world_size cp_rank cp_tot_seqused_k
    """,
)
"""Parameters of the operator ``fwd``, in order."""


def attend(q, qv, k, v, page_table, rows, starts, begin, end, scale, causal):
    """Scores are ``q k + qv v``. Returns the attention [T, H, D] and log-sum-exps [H, T]."""
    out = torch.full(qv.shape, float("nan"), dtype=torch.float64)
    lse = torch.full((qv.shape[1], len(qv)), float("nan"), dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        tokens = slice(int(starts[i]), int(starts[i + 1]))
        at = torch.arange(int(begin[i]), int(end[i]))
        page, offset = page_table[row, at // k.shape[1]].long(), at % k.shape[1]
        keys, values = k[page, offset, 0].double(), v[page, offset, 0].double()
        scores = scale * (q[tokens].double() @ keys.T + qv[tokens].double() @ values.T)
        if causal:
            count = tokens.stop - tokens.start
            last = int(end[i]) - count + torch.arange(count)
            scores[(at > last[:, None])[:, None].expand_as(scores)] = float("-inf")
        out[tokens] = scores.softmax(-1) @ values
        lse[:, tokens] = scores.logsumexp(-1).T
    return out, lse


def check_answers(attention, causal):
    """A host's kernel, by its definition, answers as the stand-in of the other tests does: for two
    entries of three pages' rows, which begin behind the rows' starts.
    """
    draw = torch.Generator().manual_seed(3)
    cache = torch.randn(9, 2, 1, 12, generator=draw)
    q = torch.randn(5, 3, 12, generator=draw)
    table = torch.randperm(9, generator=draw).int().reshape(3, 3)
    batch = KernelBatch(*(torch.tensor(each).int() for each in ([0, 2, 5], [2, 0], [1, 0], [6, 5])))
    call = LatentCall(q[..., :8], q[..., 8:], cache, table, batch, 3, 0.25, causal, 7)
    for found, expected in zip(attention(call), plain_latent_attention(call), strict=True):
        torch.testing.assert_close(found.float(), expected)

"""Check the host's MLA kernel on this machine before a server relies on it; this also compiles."""

from __future__ import annotations

import torch

from deft_backend.attention.latent_attention import LatentAttention
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.forest import forest_from_page_tables
from deft_backend.policies import get_policy
from deft_backend.settings.policy_names import DEFT_NODE

SHARED, OWN, REQUESTS = 150, 3, 5
TOLERANCE = 1.6e-2  # largest relative error: several times that of rounding to bfloat16


def failed_latent_check(attention: LatentAttention) -> str | None:
    """Why the kernel cannot be used here, in one line, or None.

    A few requests that share a prefix are planned and computed, with a padding request. The kernel
    must read rows of the page table, ranges that begin within one, and empty entries.
    """
    shape, device = attention.shape, attention.device
    requests = min(REQUESTS, attention.max_batch - 1)
    if requests < 2:
        return None  # no batch of this server shares anything
    own = torch.arange(requests * OWN, dtype=torch.int32).view(requests, OWN) + SHARED
    shared = torch.arange(SHARED, dtype=torch.int32).expand(requests, SHARED)
    table = torch.cat([shared, own], dim=1).flip(0).contiguous()
    lens = torch.full((requests + 1,), SHARED + OWN, dtype=torch.int64)
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, shape.dtype)

    heads, dim = shape.num_query_heads, shape.latent_dim
    q, cache = normal(requests + 1, heads, dim), normal(SHARED + requests * OWN, dim)
    attention.plan(
        forest_from_page_tables(table, lens[:requests].numpy()), policy=get_policy(DEFT_NODE)
    )
    rows = torch.arange(requests + 1, device=device).clamp(max=requests - 1)
    table, lens = table.to(device), lens.to(device)
    attention.lay_out(lens, table_rows=rows)
    scale = dim**-0.5
    out = attention.run(
        q[..., : shape.value_dim], q[..., shape.value_dim :], cache, table, sm_scale=scale
    )
    attention.clear_plan()
    keys = cache.view(-1, 1, 1, dim).double()
    values = keys.clone()
    want = reference_attention(q[:-1].double(), keys, values, table, lens[:-1], sm_scale=scale)
    error = relative_error(out[:-1], want[..., : shape.value_dim])
    if error < TOLERANCE:
        return None
    return f"the host's MLA kernel computes other results than float64 here (error {error:g})"

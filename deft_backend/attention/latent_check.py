"""Check the host's MLA kernel on this machine before a server relies on it; this also compiles."""

from __future__ import annotations

import torch

from deft_backend.attention.latent_attention import LatentAttention
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.forest import forest_from_page_tables
from deft_backend.policies import get_policy
from deft_backend.settings.policy_names import DEFT_NODE

SHARED, OWN, REQUESTS = 1500, 3, 5  # so much is shared that costs are for a node
TOLERANCE = 1.6e-2  # largest relative error: several times that of rounding to bfloat16


def failed_latent_check(attention: LatentAttention) -> str | None:
    """Why the kernel cannot be used here, in one line, or None.

    The kernel must read rows of the page table, ranges that begin within one, and empty entries.
    Plans come from a forest and, as in a server, from a page table.
    """
    shape, device = attention.shape, attention.device
    if attention.max_batch < 2:
        return None  # no batch of this server shares anything
    requests, size = min(REQUESTS, max(2, attention.max_batch - 1)), shape.page_size
    every = min(requests + 1, attention.max_batch)
    shared, own = -(-SHARED // size), -(-(OWN + attention.query_tokens) // size)
    pages = torch.arange(requests * own, dtype=torch.int32).view(requests, own) + shared
    prefix = torch.arange(shared, dtype=torch.int32).expand(requests, shared)
    table = torch.cat([prefix, pages], dim=1).flip(0).contiguous()
    tokens = attention.query_tokens
    lens = torch.full((every,), shared * size + OWN + tokens, dtype=torch.int64)
    generator = torch.Generator().manual_seed(7)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(device, shape.dtype)

    heads, dim = shape.num_query_heads, shape.latent_dim
    q, cache = (
        normal(every * tokens, heads, dim),
        normal(shared + requests * own, size, dim),
    )
    forest = forest_from_page_tables(table, lens[:requests].numpy(), size)
    attention.plan(forest, policy=get_policy(DEFT_NODE))
    rows = torch.arange(every, device=device).clamp(max=requests - 1)
    table, lens = table.to(device), lens.to(device)
    attention.lay_out(lens, table_rows=rows)
    scale = dim**-0.5
    keys = cache.unsqueeze(2).double()
    computed = requests * tokens
    want = reference_attention(
        q[:computed].double(), keys, keys.clone(), table, lens[:requests], sm_scale=scale
    )[..., : shape.value_dim]

    def error(table: torch.Tensor) -> float:
        nope, rope = q[..., : shape.value_dim], q[..., shape.value_dim :]
        return relative_error(
            attention.run(nope, rope, cache, table, sm_scale=scale)[:computed], want
        )

    errors = [error(table)]
    # Padding requests of graphs: of no tokens in vLLM, in SGLang of the query tokens of a chain.
    paddings = (0,) if tokens == 1 else (0, tokens)
    for padding in paddings:
        lens[requests:] = padding
        attention.plan_batch(table[rows], lens.int())
        errors.append(error(table[rows]))
    attention.clear_plan()
    wrong = [error for error in errors if not error < TOLERANCE]  # NaN is less than nothing
    if not wrong:
        return None
    return f"the host's MLA kernel computes other results than float64 here (error {wrong[0]:g})"

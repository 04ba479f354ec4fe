"""Check the kernels of this machine: random forests, each output row against float64 attention.

`deft doctor --check` does so, and a server without a recorded result for its GPU, Triton and torch,
before it captures graphs. A server of an MLA model checks the host's kernel, which compiles it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from deft_backend.attention.latent_attention import LatentAttention
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.attention.tree_attention import TreeAttention
from deft_backend.compile.variants import Variant, compiled_meanwhile, recorded
from deft_backend.forest import forest_from_page_tables
from deft_backend.policies import get_policy
from deft_backend.settings.policy_names import DEFT_NODE

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest relative error of a row, by the dtype of queries; rounding makes a quarter of it."""

REQUESTS = 12  # of a check

MOST_BYTES = 1 << 28  # about what the keys of a check may span, and so may its values

RECORDED = {
    "H100": {("3.6", "2.11"), ("3.7", "2.13"), ("3.8", "2.14")},
    "H200": {("3.6", "2.11"), ("3.8", "2.14")},
}
"""Where recorded results exist, in `docs/results`: by a word of the GPU's name, minor versions of
Triton and of torch that decoded there. A server on anything else checks its kernels itself before
it captures graphs. Add a line here together with its record."""


@dataclass(frozen=True)
class Case:
    """One run of an attention."""

    on_device: bool  # whether the device planner makes the plan; else the reference
    query_tokens: int = 1  # of each request
    trees: bool = False  # whether several query tokens form a token tree; else they form a chain
    ragged: bool = False  # whether `query_start` tells where the requests' rows begin
    soft_cap: bool = False
    sinks: torch.dtype | None = None

    def __str__(self) -> str:
        step = "decode" if self.query_tokens == 1 else "tree" if self.trees else "chain"
        more = [name for name in ("soft cap", "sinks") if getattr(self, name.replace(" ", "_"))]
        planned = f"planned on the {'device' if self.on_device else 'CPU'}"
        return ", ".join((step, *more, planned))


@dataclass(frozen=True)
class HostTensors:
    """A server's tensors, as far as kernels are compiled for them."""

    # [pages, page_size, Hkv, D] of some layer: layers do not differ in strides. One page will do.
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table_columns: Sequence[int]  # columns that the host's page table may have
    table_dtype: torch.dtype = torch.int32  # of the host's page table
    integers: torch.dtype = torch.int64  # of its table rows and its sequence lengths

    @classmethod
    def plain(cls, attention: TreeAttention) -> HostTensors:
        """Pages one after another, and numbers of 32 bits."""
        page = (2, 1, attention.page_size, attention.num_kv_heads, attention.head_dim)
        k_cache, v_cache = torch.empty(page, dtype=attention.kv_dtype)
        return cls(k_cache, v_cache, (0,), integers=torch.int32)


@dataclass(frozen=True)
class Outcome:
    """What a case gave: the largest relative error of a row, or why it could not run."""

    case: Case
    error: float | None
    failure: str | None = None


def checked(
    attention: TreeAttention, case: Case, tensors: HostTensors | None = None, seed: int = 0
) -> Outcome:
    """Run a case and compare every row; errors of compilers and launches are failures too."""
    try:
        tensors = tensors or HostTensors.plain(attention)
        # From `ordered_from` requests on, `invariant` reads most chunks with another tile.
        counts = [n for n in (REQUESTS, attention.target.ordered_from) if n]
        error, row = max(_largest_error(attention, case, tensors, seed, n) for n in counts)
    except Exception as failure:
        text = " ".join(str(failure).split()) or repr(failure)
        return Outcome(case, None, f"{type(failure).__name__}: {text[:200]}")
    most = TOLERANCE[attention.dtype]
    if error <= most:
        return Outcome(case, error)
    return Outcome(case, error, f"row {row} is off by {error:.2g} (relative; at most {most:g})")


def first_failure(
    attention: TreeAttention, cases: Sequence[Case], tensors: HostTensors, seconds: float
) -> Outcome | None:
    """The first case that fails; None if none does in the given time. One case always runs."""
    until = time.monotonic() + seconds
    for seed, case in enumerate(cases):
        outcome = checked(attention, case, tensors, seed)
        if outcome.failure is not None:
            return outcome
        if time.monotonic() > until:
            break
    return None


class CheckedShape(NamedTuple):
    """Heads and element types of an attention."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def attention(self, device: torch.device) -> TreeAttention:
        """A small one: a step has up to 16 requests of up to 4 query tokens."""
        return TreeAttention(
            **self._asdict(), device=device, page_size=16, max_batch=16, query_tokens=4
        )


def check_shapes(
    shapes: Sequence[CheckedShape], device: torch.device, until: float
) -> Iterator[tuple[CheckedShape, Outcome]]:
    """Decode and chains of each shape, and what else the first shape's kernels have variants for.

    An outcome has neither error nor failure if `until`, by the monotonic clock, came first.
    """
    attentions = {shape: shape.attention(device) for shape in shapes}
    cases = [(shape, case) for shape in shapes for case in _cases(shape == shapes[0])]
    cases.sort(key=lambda each: not each[1].on_device)
    kernels: dict[tuple[CheckedShape, Case], list[Variant]] = {}
    for shape, case in cases:
        # A failure here is the case's, which runs later.
        with recorded() as variants, suppress(Exception):
            attention = attentions[shape]
            _largest_error(attention, case, HostTensors.plain(attention), 0, compare=False)
        kernels[shape, case] = list(variants)

    def prepare() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    with compiled_meanwhile(dict.fromkeys(chain(*kernels.values())), prepare) as compiling:
        for shape, case in cases:
            needed = [compiling[variant] for variant in kernels[shape, case]]
            _, late = wait(needed, max(0.0, until - time.monotonic()))
            if late or time.monotonic() > until:
                yield shape, Outcome(case, None)
            else:  # a kernel that did not compile raises its error in the launch
                yield shape, checked(attentions[shape], case)


def _cases(first: bool) -> list[Case]:
    """The cases of a shape: planned on the device, as servers on a GPU do, and by the reference."""
    device = [Case(True), Case(True, 4), Case(True, 4, trees=True)]
    if not first:
        return [*device[:2], Case(False)]
    return [*device, *(replace(case, on_device=False) for case in device)]


def _largest_error(
    attention: TreeAttention,
    case: Case,
    tensors: HostTensors,
    seed: int,
    most: int = REQUESTS,
    *,
    compare: bool = True,
) -> tuple[float, int]:
    """Of a batch of `most` requests, if the attention holds them: the largest relative error of a
    row of the output, and the row; 0 if nothing is compared.
    """
    device, dtype, heads = attention.device, attention.dtype, attention.num_query_heads
    tokens = case.query_tokens
    requests = min(most, attention.max_batch)
    # A host may lay the pages of all layers together.
    page_bytes = tensors.k_cache.stride(0) * tensors.k_cache.itemsize
    fit = MOST_BYTES // page_bytes // requests * attention.page_size
    longest = max(1, min(40 if attention.interpreted else 300, fit))
    table, lens, pages = _random_forest(seed, requests, attention.page_size, tokens, longest)
    # Drawn where they are used: a CPU takes longer to draw the caches than a GPU to read them.
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    held = np.zeros((requests, max(table.shape[1], tensors.table_columns[0])), dtype=np.int64)
    held[:, : table.shape[1]] = table
    page_table = torch.from_numpy(held).to(device, tensors.table_dtype)
    seq_lens = torch.from_numpy(lens).to(device, tensors.integers)
    q = normal(requests * tokens, heads, attention.head_dim).to(dtype)
    caches = []
    for like in (tensors.k_cache, tensors.v_cache):
        cache = normal(pages, *like.shape[1:]).to(attention.kv_dtype)
        strided = torch.empty_strided(
            cache.shape, like.stride(), dtype=attention.kv_dtype, device=device
        )
        caches.append(strided.copy_(cache))
    rows = torch.arange(requests, device=device).to(tensors.integers)
    k_scale, v_scale = (1.0, 1.0) if attention.kv_dtype == dtype else (0.5, 2.0)
    given: tuple[float | torch.Tensor, ...] = (k_scale, v_scale)
    if attention.kv_dtype != dtype:  # hosts hold the scales on the device
        given = (attention.unit_scale * k_scale, attention.unit_scale * v_scale)
    sinks = None if case.sinks is None else normal(heads).to(case.sinks)
    start, bits = None, None
    if case.ragged:
        start = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens
    if case.trees:
        bits = _random_trees(seed, requests, tokens).to(device)
    cap = 20.0 if case.soft_cap else 0.0

    if case.on_device:
        # The device planner repeats by address what it has launched twice for the same tensors:
        # the third plan, of other lengths, shows whether it may.
        for length in (seq_lens.clone(),) if attention.interpreted else (tokens, tokens, lens):
            seq_lens.copy_(torch.as_tensor(length))
            attention.plan_batch(
                page_table, seq_lens, table_rows=rows, query_tokens=tokens, on_device=True
            )
    else:
        forest = forest_from_page_tables(table, lens, attention.page_size)
        attention.plan(forest, query_tokens=tokens)
    attention.poison_workspace()
    out = torch.full_like(q, float("nan"))
    more: dict[str, Any] = {"query_start": start, "ancestors": bits, "logit_cap": cap}
    more |= {"sinks": sinks, "k_scale": given[0], "v_scale": given[1]}
    keys, values = caches
    attention.run(q, keys, values, page_table, seq_lens, table_rows=rows, out=out, **more)
    if not compare:
        return 0.0, 0
    keys, values = (cache.unsqueeze(1) if cache.dim() == 3 else cache for cache in caches)
    more |= {"k_scale": k_scale, "v_scale": v_scale}
    expected = reference_attention(q, keys, values, page_table, seq_lens, **more)
    errors = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    errors = errors.nan_to_num(nan=float("inf")).amax(dim=-1)
    row = int(errors.argmax())
    return float(errors[row]), row


def _random_forest(
    seed: int, requests: int, page_size: int, query_tokens: int, longest: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Page table, lengths and pages: a prefix of most requests, one of some, and strangers."""
    random = np.random.default_rng(seed)
    taken = 0

    def pages(count: int) -> list[int]:
        nonlocal taken
        taken += count
        return list(range(taken - count, taken))

    most = max(2, longest // page_size)
    prefix, part = (pages(int(random.integers(1, most + 1))) for _ in range(2))
    paths, lens = [], []
    for request in range(requests):
        path = [] if request % 6 == 5 else prefix + part if request % 2 else prefix
        own = int(random.integers(0, longest)) + query_tokens
        paths.append(path + pages(-(-own // page_size)))
        lens.append(len(path) * page_size + own)
    placed = random.permutation(taken)
    table = np.zeros((requests, max(map(len, paths))), dtype=np.int32)
    for row, path in enumerate(paths):
        table[row, : len(path)] = placed[path]
    return table, np.array(lens, dtype=np.int32), taken


def _random_trees(seed: int, requests: int, tokens: int) -> torch.Tensor:
    """[B, Q, words] int64: each query token sees itself and the ancestors of an earlier one."""
    random = np.random.default_rng(seed)
    seen = np.zeros((requests, tokens, -(-tokens // 64) * 64), dtype=bool)
    for request in seen:
        for token in range(tokens):
            if token:
                request[token] = request[random.integers(0, token)]
            request[token, token] = True
    return torch.from_numpy(np.packbits(seen, axis=-1, bitorder="little").view(np.int64))


def unrecorded(gpu_name: str) -> str | None:
    """What has no recorded result here, in a few words; None if this GPU kind, Triton and torch
    have one."""
    kind = next((kind for kind in RECORDED if kind in gpu_name.split()), None)
    if kind is None:
        return gpu_name
    versions = _minor(triton.__version__), _minor(torch.__version__)
    if versions in RECORDED[kind]:
        return None
    return f"{kind} with Triton {versions[0]} and torch {versions[1]}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


_SHARED, _OWN, _REQUESTS = 1500, 3, 5  # so much is shared that costs are for a node
LATENT_TOLERANCE = 1.6e-2  # largest relative error: several times that of rounding to bfloat16


def failed_latent_check(attention: LatentAttention) -> str | None:
    """Why the kernel cannot be used here, in one line, or None.

    The kernel must read rows of the page table, ranges that begin within one, and empty entries.
    Plans come from a forest and, as in a server, from a page table.
    """
    shape, device = attention.shape, attention.device
    if attention.max_batch < 2:
        return None  # no batch of this server shares anything
    requests, size = min(_REQUESTS, max(2, attention.max_batch - 1)), shape.page_size
    every = min(requests + 1, attention.max_batch)
    shared, own = -(-_SHARED // size), -(-(_OWN + attention.query_tokens) // size)
    pages = torch.arange(requests * own, dtype=torch.int32).view(requests, own) + shared
    prefix = torch.arange(shared, dtype=torch.int32).expand(requests, shared)
    table = torch.cat([prefix, pages], dim=1).flip(0).contiguous()
    tokens = attention.query_tokens
    lens = torch.full((every,), shared * size + _OWN + tokens, dtype=torch.int64)
    generator = torch.Generator().manual_seed(7)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(device, shape.dtype)

    heads, dim = shape.num_query_heads, shape.latent_dim
    q, cache = (normal(every * tokens, heads, dim), normal(shared + requests * own, size, dim))
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
    wrong = [error for error in errors if not error < LATENT_TOLERANCE]  # NaN is less than nothing
    if not wrong:
        return None
    return f"the host's MLA kernel computes other results than float64 here (error {wrong[0]:g})"

"""Page tables, random queries and a random KV cache of a case, the same for every method."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernel.tree_workloads import Case
from benchmarks.kernel.verified_workloads import bits_of, seen_by
from deft_backend.forest import PrefixForest, forest_from_page_tables

_POOL_SLACK = 8


@dataclass(frozen=True)
class PageTables:
    """A workload's page tables, as a host would hold them.

    - `page_table`: [B, P] int32. Page ids, on the CPU; 0 behind a request's last page.
    - `seq_lens`: [B] int32. Tokens of each request.
    - `page_size`: tokens per page.
    - `num_pages`: pages of the pool.
    - `tokens_stored`: tokens in the pages of the batch; shared tokens count once.
    """

    page_table: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    page_size: int
    num_pages: int
    tokens_stored: int

    @property
    def tokens_attended(self) -> int:
        """Tokens that the queries attend to, summed over queries."""
        return int(self.seq_lens.sum(dtype=np.int64))

    @property
    def pages_used(self) -> npt.NDArray[np.int32]:
        """[B] pages of each request, with a partly filled last one."""
        return -(-self.seq_lens // self.page_size)


@dataclass(frozen=True)
class Inputs:
    """The input of every method.

    - `tables`: the batch's page tables, on the CPU.
    - `forest`: built from the page tables.
    - `q`: [T, Hq, D]. In the measured dtype, on the device. Each request has T / B query tokens.
    - `k_cache, v_cache`: [pages, page_size, Hkv, D]. In the cache's dtype, on the device. A number
      stands for itself: there are no scales.
    - `ancestors`: [B, query tokens, words] int64. The bits of a token tree, on the device; None:
      the query tokens are a chain.
    - `page_table, seq_lens`: [B, P] and [B] int32. On the device.
    """

    case: Case
    tables: PageTables
    forest: PrefixForest
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    ancestors: torch.Tensor | None = None

    @property
    def attended(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values, page table and lengths."""
        return self.q, self.k_cache, self.v_cache, self.page_table, self.seq_lens

    @property
    def query_tokens(self) -> int:
        """Query tokens of each request."""
        return self.case.workload.query_tokens

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """[query tokens, query tokens]: which of its request's query tokens each sees."""
        return seen_by(self.case.workload.parents, self.query_tokens)

    @property
    def batch(self) -> int:
        return len(self.tables.seq_lens)

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of the batch; shared ones count once."""
        width = self.case.kv_heads * self.head_dim * self.k_cache.itemsize
        return 2 * self.tables.tokens_stored * width

    def slots(
        self, request: npt.NDArray[np.integer[Any]], position: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.int64]:
        """Where the cache, seen as [slots, Hkv, D], holds the tokens at these positions."""
        size = self.case.page_size
        page = self.tables.page_table[request, position // size].astype(np.int64)
        slots: npt.NDArray[np.int64] = page * size + position % size
        return slots

    def flattened_slots(self) -> npt.NDArray[np.int64]:
        """[N] the slots of the forest's tokens, node by node in depth-first order."""
        forest = self.forest
        nodes = zip(forest.start.tolist(), forest.end.tolist(), strict=True)
        position = np.concatenate([np.arange(start, end) for start, end in nodes])
        return self.slots(np.repeat(forest.request, forest.length), position)

    def slots_of_requests(self, longest: int) -> npt.NDArray[np.int64]:
        """[B * longest] the slots of each request's tokens; those behind its end mean nothing."""
        batch, position = np.arange(self.batch), np.arange(longest)
        return self.slots(np.repeat(batch, longest), np.tile(position, self.batch))

    @property
    def flops(self) -> int:
        """Operations of the attention: 4 per attended token, query head and dimension."""
        tokens = self.tables.tokens_attended * self.query_tokens
        return 4 * tokens * self.case.query_heads * self.head_dim


def lay_out(forest: PrefixForest, page_size: int, layout: str, seed: int) -> PageTables:
    """Page tables of a forest with a page size of 1.

    Only full pages are shared. A page belongs to the node that holds its last token. The remaining
    tokens of a request lie in a page of their own.

    - `forest`: with a page size of 1.
    - `page_size`: tokens per page.
    - `layout`: of the pages: ``shuffled`` in a larger pool, as in a host after some time, or
      ``contiguous``.
    - `seed`: the same seed gives the same pages.
    """
    lens = forest.seq_lens.astype(np.int32)
    table = np.zeros((len(lens), max(1, -(-int(lens.max(initial=0)) // page_size))), dtype=np.int32)
    used = 0
    for start, length, begin, end in zip(
        forest.start.tolist(),
        forest.length.tolist(),
        forest.query_begin.tolist(),
        forest.query_end.tolist(),
        strict=True,
    ):
        first, last = start // page_size, (start + length) // page_size
        table[forest.order[begin:end], first:last] = np.arange(used, used + last - first)
        used += last - first
    stored = used * page_size
    for row in np.flatnonzero(lens % page_size).tolist():
        table[row, lens[row] // page_size] = used
        stored += int(lens[row]) % page_size
        used += 1
    num_pages = max(1, used)
    if layout == "shuffled":
        num_pages += -(-used // _POOL_SLACK)
        places = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
        in_use = np.arange(table.shape[1]) < (-(-lens // page_size))[:, None]
        table = np.where(in_use, places[table], 0).astype(np.int32)
    return PageTables(table, lens, page_size, num_pages, stored)


def make_inputs(
    case: Case,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    device: torch.device,
    layout: str = "shuffled",
    seed: int = 0,
) -> Inputs:
    """New random data for a case. Pages, queries and cache depend on the seed and the case.

    `kv_dtype` is the cache's dtype, if it is another one.
    """
    seed = zlib.crc32(f"{case.workload.set} {case.workload.name} {case.heads}".encode()) + seed
    tables = lay_out(case.workload.forest, case.page_size, layout, seed)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    workload, ancestors = case.workload, None
    if workload.parents is not None:
        bits = torch.from_numpy(bits_of(seen_by(workload.parents, workload.query_tokens)))
        ancestors = bits.to(device).expand(len(tables.seq_lens), *bits.shape).contiguous()
    cache = (tables.num_pages, case.page_size, case.kv_heads, head_dim)
    return Inputs(
        case=case,
        tables=tables,
        forest=forest_from_page_tables(tables.page_table, tables.seq_lens, case.page_size),
        q=normal(len(tables.seq_lens) * workload.query_tokens, case.query_heads, head_dim),
        k_cache=normal(*cache).to(kv_dtype or dtype),
        v_cache=normal(*cache).to(kv_dtype or dtype),
        page_table=torch.from_numpy(tables.page_table).to(device),
        seq_lens=torch.from_numpy(tables.seq_lens).to(device),
        ancestors=ancestors,
    )

"""What the kernels of stage 1 take: one structure for each group of values that travels together.

All kernels of stage 1 have these parameters, so one launch serves them::

    kernel(tensors, plan, scaling, strides, HEADS, CACHE, TILE, MODE)

A launch passes tensors and numbers; in a kernel the same field holds a pointer or a number. `plan`
is :class:`~deft_backend.planner.device_plan.ItemArrays`. The last four are constants: each of
their values compiles another kernel. Parameters in capitals are constants in every function.

Triton passes a NamedTuple field by field, so a structure costs a kernel nothing.
Two rules keep the structures working on Triton 3.6 to 3.9:

- No field may be called `type` or `values`: Triton's own tuple has attributes of these names.
- A field of a constant enters a list for a jit function only under a name of its own
  (``DIM: gl.constexpr = HEADS.dim``). Triton 3.6 rejects the field itself.
"""

from __future__ import annotations

from typing import NamedTuple

from deft_backend.planner.device_plan import Pointer


class Partials(NamedTuple):
    """The workspace: partial results by slot and query head."""

    out: Pointer
    """[E, Hq, D] float16 or float32: each output divided by the element of largest size in it."""
    lse: Pointer  # [E, Hq] float32, in base 2
    scale: Pointer  # [E, Hq] float32: the largest size of an element of the output


class Tensors(NamedTuple):
    """The tensors of a :class:`~deft_backend.kernels.both_stages.Step`."""

    q: Pointer
    k: Pointer
    v: Pointer
    out: Pointer
    partial: Partials
    page_table: Pointer
    table_rows: Pointer  # by segment of the plan
    seq_lens: Pointer
    query_start: Pointer
    """[B + 1] int32: index in `q` of each request's first query token; only where
    `Heads.ragged`."""
    ancestors: Pointer
    """[B, query tokens, words] int64: bits of a token tree; only where `Heads.tree`."""
    sinks: Pointer  # [Hq]: the sink of each query head; only where `Mode.sinks`
    k_scale: Pointer
    v_scale: Pointer  # [1] float32: the scales of the cache; only where `Mode.device_scales`


class Scaling(NamedTuple):
    """How a product of query and key becomes a score, and a sum of stored values an output."""

    scale: float
    """Brings scores to base 2. With a soft cap it is `sm_scale`, without the change of base."""
    cap: float  # the soft cap, unused without one
    value: float  # the scale of stored values; only for a cache of 8 bits


class Strides(NamedTuple):
    """Strides in elements, of the tensors whose strides can differ between batches."""

    q_batch: int
    q_head: int
    out_batch: int
    out_head: int
    table: int
    ancestors_batch: int
    ancestors_token: int


class Heads(NamedTuple):
    """Constants: the head shape, and the query tokens of a request.

    A query of the plan is a query block: up to `tokens` query tokens of one request.
    """

    num_kv: int
    group: int  # query heads that share a KV head
    dim: int
    padded_dim: int  # `dim`, rounded up to a power of two
    single: bool  # whether every request has exactly one query token, as in decode
    query_tokens: int  # most query tokens of a request
    blocks: int  # query blocks of a request
    tokens: int  # most query tokens of a query block
    vectors: int  # query vectors of a query block that share a KV head: `tokens` times `group`
    ragged: bool  # whether requests have different numbers of query tokens, by `query_start`
    tree: bool  # whether the query tokens form a tree, by `ancestors`; else they form a chain


class CacheLayout(NamedTuple):
    """Constants: where the token of a page lies in K, and at the same offset in V, in elements.

    A server has few layouts of the cache, and none of them changes. Compiled in, they halve the
    time of address arithmetic.
    """

    page_size: int
    page: int
    token: int
    head: int
    exponent_bits: int
    """Of an element of a cache of 8 bits: 4 for e4m3, 5 for e5m2. 0: the cache has the dtype of the
    queries."""


class Tile(NamedTuple):
    """Constants: the tile shape and how a program works on it."""

    place: int  # the tile shape's place in ITEM_ORDER
    height: int  # query vectors
    block_tokens: int  # tokens of a KV block
    block_segments: int  # most segments of an item
    lookahead: int  # blocks that the kernels in Gluon copy ahead
    max_merged: int  # most partial results that an item of the small tile merges
    ordered: bool  # whether blocks and sums of the small tile have the large tile's order
    spread: bool
    """Whether programs of the large tile in Gluon number themselves, so that few items lie on
    different SMs."""


class Mode(NamedTuple):
    """Constants: variants of the arithmetic and of the launch."""

    soft_cap: bool
    upcast: bool  # whether the plain kernels multiply in float32, as the interpreter must
    overlapped: bool  # whether launches use programmatic dependent launch
    sinks: bool  # whether each query's softmax has a sink for each head
    device_scales: bool  # whether the device holds the scales of a cache of 8 bits

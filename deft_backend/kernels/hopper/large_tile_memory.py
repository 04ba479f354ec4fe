"""A program of the large tile on Hopper (Gluon): its registers, shared memory and number.

The GPU places all programs of a launch evenly, but not the first ones of them: of 264 programs, two
on each SM, the first 128 lie on 120 SMs of an H100. So if few items take their programs by
`program_id`, some SMs work on two items while others have none. Here the programs count themselves
instead, in memory that all of them share:

- A program that is its SM's first takes the next number from 0 on.
- Every other program takes the next number from the last one down.

So each number is one program's, wherever the GPU places the programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language import constexpr

from deft_backend.kernels.hopper.parts import plus
from deft_backend.kernels.hopper.versions import constexpr_function, gl, jit, reinterpret
from deft_backend.planner.encoding import ARRIVALS


class Layout(NamedTuple):
    """Constants: layouts in registers and shared memory, and lengths of the rings of buffers."""

    scores: Any  # [queries, tokens], a matrix product's result
    output: Any  # [queries, dimensions], a matrix product's result
    queries: Any
    weights: Any  # left operands of Q K^T and of P V
    row: Any
    output_row: Any  # one number for each query vector, as `scores` and `output` hold it
    copy: Any  # whole rows side by side, 16 bytes a thread
    copy_row: Any
    kv_copy: Any
    kv_copy_row: Any  # the same for keys and values, which may have elements of another size
    each: Any  # one number a thread
    matrix: Any  # shared memory that tensor cores read
    kv_matrix: Any  # shared memory of keys and values as they lie in the cache
    plain: Any  # shared memory of numbers
    at_once: int
    kv_at_once: int  # rows that all threads copy at once: one thread copies rows so far apart
    kv_unit: int  # elements of keys and values in 16 bytes
    slots: int  # blocks of K, and of V: the block being multiplied and those on their way
    known: int
    """Blocks whose offsets are known, a power of two. The V block that is copied next is the first
    of them; the last is one behind the K block that is copied next."""
    pages: int
    """Blocks whose page ids are in shared memory, behind the known ones. Half are on their way."""


@constexpr_function
def layout_of(head_dim, block_tokens, lookahead, warps, exponent_bits):
    """The layout; `lookahead`: blocks copied ahead, `exponent_bits`: of a cache of 8 bits."""
    scores = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_tokens, 16])
    output = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, head_dim, 16])
    copy = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [warps, 1], [1, 0])
    unit = 16 if exponent_bits else 8
    kv_copy = gl.BlockedLayout(
        [1, unit], [32 * unit // head_dim, head_dim // unit], [warps, 1], [1, 0]
    )
    matrix = gl.NVMMASharedLayout(128, 16)
    layout = Layout(
        scores=scores,
        output=output,
        queries=gl.DotOperandLayout(0, scores, 2),
        weights=gl.DotOperandLayout(0, output, 2),
        row=gl.SliceLayout(1, scores),
        output_row=gl.SliceLayout(1, output),
        copy=copy,
        copy_row=gl.SliceLayout(1, copy),
        kv_copy=kv_copy,
        kv_copy_row=gl.SliceLayout(1, kv_copy),
        each=gl.BlockedLayout([1], [32], [warps], [0]),
        matrix=matrix,
        kv_matrix=gl.SwizzledSharedLayout(16, 1, 8, [1, 0]) if exponent_bits else matrix,
        plain=gl.SwizzledSharedLayout(1, 1, 1, [0]),
        at_once=256 // head_dim * warps,
        kv_at_once=32 * unit // head_dim * warps,
        kv_unit=unit,
        slots=lookahead + 1,
        known=4 if lookahead <= 2 else 8,
        pages=8,
    )
    # Each as a constant of its own: Triton 3.6 passes nothing else on to functions.
    return Layout(*map(gl.constexpr, layout))


class Buffers(NamedTuple):
    k: Any
    v: Any  # [slots, tokens, D]: rings of KV blocks
    key_operand: Any
    value_operand: Any
    """[tokens, D]: of a cache of 8 bits, the blocks being multiplied, as operands."""
    offsets: Any
    """[known, tokens] int32: ring of where the blocks' tokens lie in K and in V (`offsets_of`), in
    the order of `row_of_place`."""
    pages: Any  # [pages, tokens]: ring of page ids, in the same order
    places: Any
    """[2, M] int32: where each query vector lies, and where its result goes (`result_place`)."""
    rows: Any  # [M, D]: Q, and later the results, as whole rows, while no block of V is there
    first_pages: Any  # [known * tokens]: page ids of an item's first blocks, until the item begins
    entries: Any  # [2, M] int32: query and slot of each query vector, until the item begins


@jit
def allocate(tensors, HEADS, CACHE, TILE, LAYOUT):
    """Allocate a program's shared memory.

    Q and the results share the memory of the V block that is copied last, or of the operand that
    V becomes. What an item needs first comes to memory that later holds the pages and offsets of
    its blocks.
    """
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    STORED: gl.constexpr = tensors.k.dtype.element_ty
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    PAGE_ID: gl.constexpr = tensors.page_table.dtype.element_ty
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    PAGES: gl.constexpr = LAYOUT.pages
    KNOWN: gl.constexpr = LAYOUT.known
    gl.static_assert(BLOCK_M == BLOCK_N)
    k = gl.allocate_shared_memory(STORED, [LAYOUT.slots, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    v = gl.allocate_shared_memory(STORED, [LAYOUT.slots, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    offsets = gl.allocate_shared_memory(gl.int32, [KNOWN, BLOCK_N], LAYOUT.plain)
    pages = gl.allocate_shared_memory(PAGE_ID, [PAGES, BLOCK_N], LAYOUT.plain)
    if EXPONENT_BITS > 0:
        keys = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], LAYOUT.matrix)
        values = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], LAYOUT.matrix)
        rows = values
    else:
        keys, values, rows = k.index(0), v.index(0), v.index(LAYOUT.slots - 1)
    places = gl.allocate_shared_memory(gl.int32, [2, BLOCK_M], LAYOUT.plain)
    first_pages = in_one_row(pages, LAYOUT).slice(0, KNOWN * BLOCK_N)
    return Buffers(k, v, keys, values, offsets, pages, places, rows, first_pages, offsets)


@jit
def in_one_row(buffer, LAYOUT):
    """Return a buffer of rows of numbers as one long row."""
    LENGTH: gl.constexpr = buffer.shape[0] * buffer.shape[1]
    PLAIN: gl.constexpr = LAYOUT.plain
    return reinterpret(buffer, buffer.dtype, [LENGTH], PLAIN)


@jit
def hidden_zero(number):
    """Return 0, computed from a number below 65,536 so that the compiler does not know it.

    With it, the compiler computes what follows from a row's number anew for each item, and does not
    hold it in registers, which the loop over blocks needs.
    """
    return number >> 16


FIRST, LATER, BY_SM = constexpr(0), constexpr(1), constexpr(2)
"""The plan's counters: of programs that are their SM's first, of all others, and from here on one
for each SM."""

SMS = constexpr(ARRIVALS - 2)
"""SMs that have a counter of their own. Two SMs that share one are counted as one."""


@jit
def _count(counter, LAYOUT):
    """[threads]: how often the counter was counted before, in the first thread; 0 in all others.

    Nothing waits for the number before it is used, as it would for ``atomic_add``, and for ``add``,
    whose result the assembler shares with the other threads of the warp.
    """
    thread = gl.arange(0, 32 * gl.num_warps(), layout=LAYOUT.each)
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        setp.eq.s32 first, $2, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff;
        }""",
        "=&r,l,r",
        [counter + thread * 0, thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def count_on_sm(arrivals, LAYOUT):
    """Count this program on its SM; returns what :func:`spread_number` takes."""
    sm = gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    return _count(arrivals + BY_SM.value + sm % SMS.value, LAYOUT)


@jit
def spread_number(arrivals, counted, LAYOUT):
    """The number of this program. All programs of the launch must ask for theirs.

    Before the launch, FIRST and LATER must be 0. Where an SM's counter is not, the numbers hold,
    but spread less.
    """
    first = gl.reduce(counted, 0, plus) == 0
    counter = gl.where(first, FIRST.value, LATER.value)
    place = gl.reduce(_count(arrivals + counter, LAYOUT), 0, plus)
    return gl.where(first, place, gl.num_programs(0) - 1 - place)

"""The online softmax of large tiles, in the layout of a Hopper matrix product's result (Gluon)."""

from __future__ import annotations

from deft_backend.kernels.hopper.parts import larger, plus
from deft_backend.kernels.hopper.versions import gl, jit


@jit
def _by_thread(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Reshape [ROWS, COLUMNS] so that one axis counts the 4 threads that share a row.

    A thread of a matrix product's result holds two neighbours in every eight columns. A reduction
    of this shape is several short chains of operations, which keep the arithmetic units filled.
    """
    return gl.reshape(x, [ROWS, 4, COLUMNS // 32, 4, 2])


@jit
def _row_max(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS]: each row's maximum."""
    x = _by_thread(x, ROWS, COLUMNS)
    x = gl.reduce(gl.reduce(gl.reduce(x, 2, larger), 1, larger), 2, larger)
    return gl.reduce(x, 1, larger)


@jit
def _thread_sum(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, 4]: the sum over the columns that each of a row's 4 threads holds."""
    x = _by_thread(x, ROWS, COLUMNS)
    return gl.reduce(gl.reduce(gl.reduce(x, 2, plus), 1, plus), 2, plus)


@jit
def softmax(
    scores, maximum, factor, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Compute the weights of one block.

    Returns the weights, their sums by thread, the new row maxima, and `rescale`: factors that bring
    earlier weights to the new maxima. `factor` brings scores to base 2.
    """
    highest = _row_max(scores, ROWS, COLUMNS)
    new_maximum = gl.maximum(maximum, gl.convert_layout(highest, ROW) * factor)
    # A query vector that has seen no token keeps its maximum at -inf: avoid -inf - -inf.
    reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = gl.exp2(scores * factor - reference[:, None])
    rescale = gl.exp2(maximum - reference)
    return weights, _thread_sum(weights, ROWS, COLUMNS), new_maximum, rescale


@jit
def settled(sums):
    """Return `sums`, and keep the wait that follows behind the softmax.

    The kernel waits for P V of the block before only after the softmax, so that both run at once.
    The assembler would move that wait up, ahead of everything that does not need the product. It
    moves no wait ahead of a store. So this function stores, under a condition that never holds: the
    sign bit of a sum of powers of two. The assembler does not know that this bit is never set, as
    it would know of a comparison with 0.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred below;
        .reg .b32 nowhere, bits;
        mov.u32 nowhere, 0;
        mov.b32 bits, $1;
        setp.lt.s32 below, bits, 0;
        @below st.shared.b32 [nowhere], bits;
        mov.b32 $0, $1;
        }""",
        "=f,f", [sums], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def add_rescaled(total, rescale, added):
    """Sums by thread, with the sums of one more block added."""
    ROW: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return total * gl.convert_layout(rescale, ROW)[:, None] + added


@jit
def masked(scores, tokens, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores with -inf in the columns from `tokens` on.

    The mask works on groups of eight columns. Every thread has columns of each group, so group
    numbers are constants.
    """
    groups = gl.reshape(scores, [ROWS, COLUMNS // 8, 8])
    GROUPS: gl.constexpr = groups.type.layout
    group = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, GROUPS)))
    left = gl.expand_dims(gl.expand_dims(tokens - group * 8, 0), 2)
    blocks = gl.expand_dims(gl.expand_dims(column, 0), 1) < left
    groups = gl.where(blocks, groups, float("-inf"))
    return gl.convert_layout(gl.reshape(groups, [ROWS, COLUMNS]), LAYOUT.scores)

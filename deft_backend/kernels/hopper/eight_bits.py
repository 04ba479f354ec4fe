"""KV blocks in shared memory as operands of the tensor cores, whatever the cache's dtype (Gluon).

A cache of 16 bits has the operands' dtype. A cache of 8 bits holds bytes, which the kernels convert
in registers (`eight_bits`). The small tile multiplies them from there. The large tile stores them
to shared memory again, where its matrix products read keys and values.

The small tile takes values transposed: a register holds one dimension of neighbouring tokens. The
instruction that transposes while it loads moves 16 bits, so it moves two dimensions of a token
together. The kernel separates the two in registers. Its operand holds the even dimensions first
and the odd dimensions behind them. So does the sum of values, until `in_order`.
"""

from __future__ import annotations

from deft_backend.kernels.hopper.versions import gl, jit, reinterpret
from deft_backend.kernels.plain.eight_bits import (
    E4M3_PAIRS_TO_BFLOAT16,
    E4M3_PAIRS_TO_FLOAT16,
    E4M3_TO_BFLOAT16,
    E4M3_TO_FLOAT16,
    E5M2_PAIRS_TO_BFLOAT16,
    E5M2_PAIRS_TO_FLOAT16,
    E5M2_TO_BFLOAT16,
    E5M2_TO_FLOAT16,
)


@jit
def _converted(x, DTYPE, EXPONENT_BITS):
    """Convert bytes to numbers; each thread holds groups of four neighbouring bytes."""
    if DTYPE == gl.float16:  # noqa: SIM300
        HALF: gl.constexpr = E4M3_TO_FLOAT16 if EXPONENT_BITS == 4 else E5M2_TO_FLOAT16
        return gl.inline_asm_elementwise(
            HALF, "=&r,=&r,r", [x], dtype=gl.float16, is_pure=True, pack=4
        )
    else:
        BRAIN: gl.constexpr = E4M3_TO_BFLOAT16 if EXPONENT_BITS == 4 else E5M2_TO_BFLOAT16
        return gl.inline_asm_elementwise(
            BRAIN, "=&r,=&r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=4
        )


@jit
def as_operand(stored, operand, EXPONENT_BITS, LAYOUT):
    """Store a block of bytes as an operand, [tokens, D]; return the operand."""
    DTYPE: gl.constexpr = operand.dtype
    operand.store(_converted(stored.load(LAYOUT.kv_copy), DTYPE, EXPONENT_BITS))
    return operand


@jit
def keys_of(k, DTYPE, EXPONENT_BITS, LAYOUT):
    """[tokens, D]: a block of keys as the left operand."""
    keys = k.load(LAYOUT.keys)
    if EXPONENT_BITS > 0:
        keys = _converted(keys, DTYPE, EXPONENT_BITS)
    return keys


@jit
def _separated(pairs, DTYPE, EXPONENT_BITS):
    """The even dimensions and the odd dimensions of pairs of bytes."""
    if DTYPE == gl.float16:  # noqa: SIM300
        HALF: gl.constexpr = E4M3_PAIRS_TO_FLOAT16 if EXPONENT_BITS == 4 else E5M2_PAIRS_TO_FLOAT16
        return gl.inline_asm_elementwise(
            HALF, "=&r,=&r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    else:
        BRAIN: gl.constexpr = (
            E4M3_PAIRS_TO_BFLOAT16 if EXPONENT_BITS == 4 else E5M2_PAIRS_TO_BFLOAT16
        )
        return gl.inline_asm_elementwise(
            BRAIN, "=&r,=&r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )


@jit
def values_of(v, DTYPE, EXPONENT_BITS, LAYOUT):
    """[D, tokens]: a block of values, transposed, as the left operand."""
    if EXPONENT_BITS == 0:
        return v.permute((1, 0)).load(LAYOUT.left)
    else:
        TOKENS: gl.constexpr = v.shape[0]
        DIM: gl.constexpr = v.shape[1]
        PAIRS: gl.constexpr = LAYOUT.matrix
        pairs = reinterpret(v, gl.int16, [TOKENS, DIM // 2], PAIRS)
        even, odd = _separated(pairs.permute((1, 0)).load(LAYOUT.left), DTYPE, EXPONENT_BITS)
        both = gl.reshape(gl.permute(gl.join(even, odd), (2, 0, 1)), [DIM, TOKENS])
        return gl.convert_layout(both, LAYOUT.left)


@jit
def in_order(acc, EXPONENT_BITS):
    """[D, M]: sums of values with their dimensions in the cache's order."""
    if EXPONENT_BITS > 0:
        DIM: gl.constexpr = acc.shape[0]
        ROWS: gl.constexpr = acc.shape[1]
        acc = gl.reshape(acc, [2, DIM // 2, ROWS])
        acc = gl.reshape(gl.permute(acc, (1, 0, 2)), [DIM, ROWS])
    return acc

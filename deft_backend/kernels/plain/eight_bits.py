"""Numbers of 8 bits as operands of the tensor cores, in the plain kernels.

A byte holds a sign, exponent bits and mantissa bits: four and three in e4m3, five and two in e5m2.
float16 and bfloat16 hold every such number. The kernels load bytes, and move exponent and mantissa
to where the operand's dtype has them. The result is the number times a power of two, because the
dtypes have different exponent biases. A multiplication corrects it, even for the smallest numbers.
No bits are lost, so the only rounding is that of the bytes in the cache.

The kernels treat every byte as a finite number.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

_MOVE = """{{
    .reg .b32 high, sign;
    prmt.b32 high, $2, 0, {bytes};
    and.b32 sign, high, 0x80008000;
    shr.b32 high, high, {shift};
    and.b32 high, high, {mask};
    or.b32 high, high, sign;
    {multiply} {to}, high, {factor}{plus};
}}"""

_HALF = {"multiply": "mul.rn.f16x2", "plus": ""}
_BRAIN = {"multiply": "fma.rn.bf16x2", "plus": ", minus_zero"}

_NEIGHBOURS = ("0x1404", "0x3424")
"""Bytes 0 and 1 to the first register, 2 and 3 to the second, each to the upper half of 16 bits."""
_ALTERNATE = ("0x2404", "0x3414")  # bytes 0 and 2 to the first register, 1 and 3 to the second


def _moved(
    kind: dict[str, str], shift: int, mask: int, factor: int, order: tuple[str, str] = _NEIGHBOURS
) -> str:
    """PTX that makes two registers of two operands each of one register of four bytes."""
    parts = []
    for to, first in zip(("$0", "$1"), order, strict=True):
        parts.append(
            _MOVE.format(
                bytes=first,
                shift=shift,
                mask=f"0x{mask:04x}{mask:04x}",
                to=to,
                factor="factor",
                **kind,
            )
        )
    declared = (
        "{ .reg .b32 factor, minus_zero; "
        f"mov.b32 factor, 0x{factor:04x}{factor:04x}; mov.b32 minus_zero, 0x80008000;"
    )
    return declared + "\n".join(parts) + "}"


def _four(order: tuple[str, str]) -> tuple[str, str, str, str]:
    """PTX of four conversions: e4m3 to float16 and to bfloat16, then e5m2 to both."""
    halves = "; ".join(
        f"prmt.b32 {to}, $2, 0, {first}" for to, first in zip(("$0", "$1"), order, strict=True)
    )
    return (
        _moved(_HALF, 1, 0x3F80, 0x5C00, order),  # times 2^8
        _moved(_BRAIN, 4, 0x07F0, 0x7B80, order),  # times 2^120
        halves + ";",
        _moved(_BRAIN, 3, 0x0FE0, 0x7780, order),  # times 2^112
    )


E4M3_TO_FLOAT16, E4M3_TO_BFLOAT16, E5M2_TO_FLOAT16, E5M2_TO_BFLOAT16 = map(
    tl.constexpr, _four(_NEIGHBOURS)
)
(E4M3_PAIRS_TO_FLOAT16, E4M3_PAIRS_TO_BFLOAT16, E5M2_PAIRS_TO_FLOAT16, E5M2_PAIRS_TO_BFLOAT16) = (
    map(tl.constexpr, _four(_ALTERNATE))
)


@jit
def _as_float32(x, EXPONENT_BITS):
    """The numbers in float32, for the interpreter, which knows no PTX."""
    bits = x.to(tl.int32)
    SHIFT: tl.constexpr = 7 if EXPONENT_BITS == 4 else 8
    FACTOR: tl.constexpr = 256.0 if EXPONENT_BITS == 4 else 1.0
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << SHIFT)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * FACTOR


@jit
def operand(x, DTYPE, EXPONENT_BITS, UPCAST):
    """A KV block as an operand of DTYPE; with UPCAST in float32, as the interpreter needs it."""
    if UPCAST:
        if EXPONENT_BITS == 0:
            return x.to(tl.float32)
        else:
            return _as_float32(x, EXPONENT_BITS)
    elif EXPONENT_BITS == 0:
        return x
    elif DTYPE == tl.float16:  # noqa: SIM300
        HALF: tl.constexpr = E4M3_TO_FLOAT16 if EXPONENT_BITS == 4 else E5M2_TO_FLOAT16
        return tl.inline_asm_elementwise(
            HALF, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        BRAIN: tl.constexpr = E4M3_TO_BFLOAT16 if EXPONENT_BITS == 4 else E5M2_TO_BFLOAT16
        return tl.inline_asm_elementwise(
            BRAIN, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4
        )

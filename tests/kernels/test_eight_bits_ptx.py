"""The PTX that makes operands of bytes, instruction by instruction: every byte, exactly."""

import re

import pytest
import torch

from deft_backend.kernels.plain import eight_bits

DTYPES = {"FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}
KINDS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def halves(register, dtype):
    """[N, 2] numbers in [N] registers of 32 bits, the lower half first."""
    split = torch.stack([register & 0xFFFF, register >> 16], dim=1)
    return split.to(torch.uint16).view(dtype)


def registers(numbers):
    low, high = numbers.view(torch.uint16).long().unbind(1)
    return low | high << 16


def executed(asm, given):
    """The two output registers of the instructions for [N] input registers."""
    held = {"$2": given}

    def value(name):
        return torch.tensor(int(name, 0)) if name[0].isdigit() else held[name]

    for line in filter(None, map(str.strip, re.split(r"[;{}]", asm))):
        if line.startswith(".reg"):
            continue
        operation, operands = line.split(None, 1)
        to, *names = (part.strip() for part in operands.split(","))
        sources = [value(name) for name in names]
        match operation:
            case "mov.b32":
                found = sources[0]
            case "and.b32":
                found = sources[0] & sources[1]
            case "or.b32":
                found = sources[0] | sources[1]
            case "shr.b32":
                found = sources[0] >> sources[1]
            case "prmt.b32":
                low, high, selector = sources
                bytes_ = [low >> 8 * i & 0xFF for i in range(4)]
                bytes_ += [high >> 8 * i & 0xFF for i in range(4)]
                chosen = [bytes_[int(selector) >> 4 * i & 0xF] for i in range(4)]
                found = sum(byte << 8 * i for i, byte in enumerate(chosen))
            case "mul.rn.f16x2" | "fma.rn.bf16x2":
                dtype = torch.bfloat16 if "bf16x2" in operation else torch.float16
                numbers = [halves(s.expand_as(given), dtype).double() for s in sources]
                product = numbers[0] * numbers[1]
                if len(numbers) > 2:
                    product += numbers[2]
                found = registers(product.to(dtype))
            case _:
                raise AssertionError(f"{operation} is not known here")
        held[to] = found
    return held["$0"], held["$1"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("form", "order"), [("", [0, 1, 2, 3]), ("_PAIRS", [0, 2, 1, 3])])
def test_every_finite_byte_is_its_number(kind, dtype, form, order):
    asm = getattr(eight_bits, f"{kind}{form}_TO_{dtype}").value
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8)
    bytes_ = torch.stack([every[torch.randperm(256, generator=generator)] for _ in range(4)], 1)
    given = sum(bytes_[:, i].long() << 8 * i for i in range(4))
    found = torch.cat([halves(r, DTYPES[dtype]) for r in executed(asm, given)], dim=1)
    expected = bytes_[:, order].contiguous().view(KINDS[kind]).to(DTYPES[dtype])
    finite = expected.isfinite()
    assert finite.sum() >= 4 * 246
    assert torch.equal(found[finite], expected[finite])
    assert torch.equal(found[finite].signbit(), expected[finite].signbit())

"""The tests' interpreter of Triton still checks integers and shapes."""

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterError


def combine(x, y, out, OPERATION: tl.constexpr):
    left, right = tl.load(x + tl.arange(0, 4)), tl.load(y + tl.arange(0, 4))
    if OPERATION == "add":
        result = left + right
    elif OPERATION == "sub":
        result = left - right
    elif OPERATION == "mul":
        result = left * right
    else:
        result = left + tl.arange(0, 2)
    tl.store(out + tl.arange(0, 4), result)


def run(operation, x, y):
    out = torch.zeros(4, dtype=torch.int32)
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (x, y))
    InterpretedFunction(combine)[(1,)](*tensors, out, OPERATION=operation)
    return out.tolist()


def test_largest_integers_pass_and_larger_ones_or_different_shapes_do_not():
    top = (1 << 31) - 1
    assert run("add", [top - 1, 2, 3, -top], [1, 2, -4, -1]) == [top, 4, -1, -top - 1]
    assert run("sub", [0, 2, -1, 7], [top, 3, top, 7]) == [-top, -1, -top - 1, 0]
    assert run("mul", [1 << 15, 3, -2, 0], [1 << 15, 5, 1 << 30, top]) == [1 << 30, 15, -1 << 31, 0]
    for operation, x, y in (("add", top, 1), ("sub", -top, 2), ("mul", 1 << 16, 1 << 15)):
        with pytest.raises(InterpreterError, match="int32 overflow detected"):
            run(operation, [0, 0, 0, x], [0, 0, 0, y])
    with pytest.raises(InterpreterError, match="incompatible dimensions"):
        run("shapes", [0] * 4, [0] * 4)

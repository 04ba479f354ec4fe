"""What the device planner's kernels share, against the reference's own functions."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from deft_backend.compile.triton_kernel import interpreted_copy
from deft_backend.planner.on_device import tiles
from deft_backend.planner.on_device.launch_numbers import Numbers
from deft_backend.policies import Invariant, Target
from deft_backend.policies.chunk_choice import Machine

LANES = 1024
device = interpreted_copy(tiles)


def computed(kernel, *arguments, dtype=torch.int32, **constants):
    """Two numbers of each lane: [LANES] in a kernel's two results."""
    out = torch.zeros(2, LANES, dtype=dtype)
    InterpretedFunction(kernel)[(1,)](*arguments, out, LANES=LANES, **constants)
    return out.numpy()


def lanes(numbers):
    """A tensor of so many numbers, the last one repeated."""
    return torch.tensor([*numbers, *[numbers[-1]] * (LANES - len(numbers))], dtype=torch.int32)


def estimates(tokens, estimate, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    length = tl.load(tokens + lane)
    small = device.estimated_ns(length, lane < 0, estimate)
    large = device.estimated_ns(length, lane >= 0, estimate)
    tl.store(out + lane, small)
    tl.store(out + LANES + lane, large)


@pytest.mark.parametrize("heads", [(32, 8), (16, 1)])
def test_estimates_are_the_cost_tables(heads):
    """At every profiled length, next to it, between two and beyond the last."""
    target = Target(*heads, head_dim=128)
    knots = target.costs.tokens.astype(int).tolist()
    around = [max(1, at + by) for at in knots for by in (-1, 0, 1)]
    length = sorted({1, 2, *around, *((a + b) // 2 for a, b in pairwise(knots)), 10**6})
    numbers = Numbers(target)
    assert numbers.sms == Machine(target, 1).sms == 132 / heads[1]
    estimate = tiles.Estimate(*numbers.estimate)
    assert len(estimate.knots) == len(knots) - 2
    found = computed(estimates, lanes(length), estimate, dtype=torch.float32)[:, : len(length)]
    for shape, times in enumerate(found):
        expected = target.costs.time(target.tile_heights[shape], np.array(length))
        np.testing.assert_allclose(times, 1e6 * expected, rtol=1e-4)


def tiled(queries, small_tile, large_tile, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    is_large, held = device.tiles_of(tl.load(queries + lane), small_tile, large_tile)
    tl.store(out + lane, is_large.to(tl.int32))
    tl.store(out + LANES + lane, held)


@pytest.mark.parametrize(("small", "large"), [(4, 16), (1, 8), (0, 2), (16, 16)])
def test_tiles_of_queries(small, large):
    """A small tile holds none if one query fills more: then every range needs large tiles."""
    queries = list(range(LANES))
    is_large, held = computed(tiled, lanes(queries), small, large)
    assert is_large.tolist() == [n > small for n in queries]
    assert held.tolist() == [1 if 0 < n <= small else -(-n // large) for n in queries]


def parted(tokens, chunk, block, estimate, out, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    length = tl.load(tokens + lane)
    tl.store(out + lane, device.parts_of(length, length, chunk, block, CHUNKS))
    tl.store(out + LANES + lane, device.sizes_of(length, lane < 0, estimate, CHUNKS))


@pytest.mark.parametrize(("chunk", "block"), [(64, 16), (5, 16), (16, 16), (1, 64)])
def test_chunks_of_ranges(chunk, block):
    """``scheduled`` divides nanoseconds: no more chunks than KV blocks, however long they take."""
    length = list(range(LANES))
    by_tokens = [max(1, -(-n // chunk)) for n in length]
    given = (lanes(length), chunk, block, tiles.Estimate((), (0.0, 3.0), (0.0, 5.0)))
    parts, sizes = computed(parted, *given, CHUNKS="balanced")
    assert (parts.tolist(), sizes.tolist()) == (by_tokens, length)
    parts, sizes = computed(parted, *given, CHUNKS="scheduled")
    assert parts.tolist() == [
        min(n, max(1, -(-t // block))) for n, t in zip(by_tokens, length, strict=True)
    ]
    assert sizes.tolist() == [max(1, 3 * n) for n in length]


def absolute(tokens, lengths, chunk, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    length = tl.load(lengths + lane)
    at = device.chunk_at(tl.load(tokens + lane), length, chunk)
    tl.store(out + lane, at)
    tl.store(out + LANES + lane, device.chunk_begin(at, length, chunk))


@pytest.mark.parametrize("short_tokens", [512, 1536, 2048])
@pytest.mark.parametrize("behind", [1, 2, 130, 700])
def test_absolute_chunks(short_tokens, behind):
    """Of tokens so far before a request's end, up to the longest context."""
    powers = [n for power in range(30) for n in ((1 << power) - 1, 1 << power, 3 << power)]
    tokens = [n for n in [*range(0, 4096, 8), *sorted({*powers})] if n < (1 << 31) - 1024]
    length = [n + behind for n in tokens]
    found = computed(absolute, lanes(tokens), lanes(length), short_tokens)[:, : len(tokens)]
    policy = Invariant(short_tokens)
    at = policy.chunk_at(np.array(tokens), np.array(length))
    assert found[0].tolist() == at.tolist()
    assert found[1].tolist() == policy.begin_of(at, np.array(length)).tolist()

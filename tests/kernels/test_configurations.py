"""The numbers that kernels run with, by GPU and shape: records justify them, not other code."""

from itertools import product
from pathlib import Path

import pytest
import torch

from deft_backend.kernels import Gpu, kernel_configuration
from deft_backend.kernels.configurations import HEAD_DIMS
from deft_backend.kernels.hopper import versions
from drawings import check_drawn

GPUS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
GROUPS = ((1, 1), (4, 1), (16, 1), (12, 4))
"""Query heads of a KV head, and query tokens."""


@pytest.fixture
def one_triton(monkeypatch):
    """As with the newest tested version of Triton, whatever runs here."""
    kernel_configuration.cache_clear()
    monkeypatch.setattr(versions, "available", lambda: True)
    monkeypatch.setattr(versions, "small_tile_limits", lambda vectors: (10 - vectors // 8, 168))
    yield
    kernel_configuration.cache_clear()


def lines():
    """A line for each tile; what equals the line of the case before is left out."""
    caches = (torch.float16, torch.float8_e5m2)
    before = []
    for name, cache, head_dim, group in product(GPUS, caches, HEAD_DIMS, GROUPS):
        shape = (head_dim, torch.float16, torch.device("cuda"), group[0], Gpu.named(name))
        config = kernel_configuration(*shape, query_tokens=group[1], kv_dtype=cache)
        rest = (config.reduce, config.few, config.sms, config.overlapped, config.few_queries(32))
        found = [*map(str, config.tiles), str(rest)]
        launched = [tile.programs_for(queries, 8) for tile in config.tiles for queries in (1, 99)]
        yield f"{name} {str(cache)[6:]} {head_dim} {group}: {launched}"
        yield from (f"  {line}" for line in found if line not in before)
        before = found


@pytest.mark.usefixtures("one_triton")
def test_the_configurations_are_as_recorded():
    check_drawn("\n".join(lines()) + "\n", Path(__file__).with_name("configurations.txt"))

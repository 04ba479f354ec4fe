"""The shapes, dtypes, planners and policies that the fuzzer chooses from, each by its number."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from deft_backend.policies import Target
from deft_backend.policy_names import AUTO, POLICY_NAMES

DEVICE = "device"
"""In place of a policy's name: the device planner plans, which follows ``auto``."""

PLANNERS = (DEVICE, *POLICY_NAMES)

HEADS = ((32, 8), (8, 2), (16, 1), (28, 4), (32, 32), (12, 1))
PAGE_SIZES = (1, 16, 64, 5)
TILES = ((8, 64, 64), (16, 48, 32), (8, 24, 12))
TOLERANCE = {"float16": 4e-3, "bfloat16": 2.5e-2, "float32": 2e-5}
"""Largest error of one query head's output: the norm of the difference over that of the output."""


@dataclass(frozen=True)
class PlanSetting:
    """What a plan without attention is made for.

    Attributes
    ----------
    query_heads, kv_heads, head_dim, page_size : int
    programs : int
        Programs that run at once for each KV head.
    tiles : tuple of int
        Heights of the tiles in query vectors.
    block_tokens : int
        Tokens of a KV block.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    programs: int
    tiles: tuple[int, ...]
    block_tokens: int

    def target(self) -> Target:
        """The target of policies and planners."""
        return Target(
            num_query_heads=self.query_heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            num_programs=self.programs, tile_heights=self.tiles,
            tile_programs=(4 * self.programs, self.programs, self.programs),
            block_tokens=self.block_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class AttentionSetting:
    """One attention: what a process compiles kernels for.

    Attributes
    ----------
    query_heads, kv_heads, head_dim, page_size : int
    dtype : str
        Of queries and KV cache.
    integers : str
        Dtype of page table, rows and lengths.
    soft_cap : float
        Soft cap of the scores; 0 for none.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    integers: str
    soft_cap: float

    def to_dict(self) -> dict[str, Any]:
        """The setting in a file of a case."""
        return asdict(self)


def plan_settings() -> list[PlanSetting]:
    """Every setting of plans, the common ones first."""
    return [
        PlanSetting(*heads, 128, page_size, programs, tiles, block)
        for tiles, programs, page_size, heads, block in itertools.product(
            TILES, (132, 33, 5), PAGE_SIZES, HEADS, (64, 1 << 15, 16)
        )
        # A large and a masked tile must hold at least the query vectors of one query.
        if min(tiles[1:]) >= heads[0] // heads[1]
    ]


def attention_settings(dtypes: tuple[str, ...]) -> list[AttentionSetting]:
    """Settings of attention: every head shape and dimension, spread over the other choices."""
    shapes = itertools.product((128, 64, 256, 96), ((32, 8), (28, 4), (16, 1), (32, 32), (8, 2)))
    found: list[AttentionSetting] = []
    for number, (head_dim, heads) in enumerate(shapes):
        for dtype in dtypes:
            found.append(
                AttentionSetting(
                    *heads, head_dim, PAGE_SIZES[(number + len(found)) % len(PAGE_SIZES)], dtype,
                    ("int32", "int64")[number % 3 == 2], (0.0, 0.0, 30.0)[len(found) % 3],
                )
            )  # fmt: skip
    return found


__all__ = [
    "AUTO", "DEVICE", "HEADS", "PAGE_SIZES", "PLANNERS", "TOLERANCE", "AttentionSetting",
    "PlanSetting", "attention_settings", "plan_settings",
]  # fmt: skip

"""The measurements of `deft tune`: sizes of the launches for each fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Sizes of the measured launches.

    Attributes
    ----------
    table_tokens : tuple of int
        KV lengths of FlashForge's table.
    tile_tokens, tile_rounds : tuple of int
        Items of each tile shape: KV lengths, and items of a program.
    result_counts, result_parts : tuple of int
        Partial results: the approximate number in a launch, and those of each query.
    fasttree_blocks : tuple of float
        Contexts of FastTree's groups in tiles of ``TS_c`` tokens.
    repetitions : int
        Repetitions of FlashForge's table; the shortest time is used.
    """

    table_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    tile_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    tile_rounds: tuple[int, ...] = (1, 2, 4)
    result_counts: tuple[int, ...] = (64, 512, 2048, 8192)
    result_parts: tuple[int, ...] = (2, 8)
    fasttree_blocks: tuple[float, ...] = (0.25, 0.5, 1, 2, 8, 32)
    repetitions: int = 2

"""The measurements of `deft tune`: sizes of the launches for each fit."""

from dataclasses import dataclass

UNSHARED = ("1 1024", "1 8192", "4 32768", "8 8192", "32 2048", "64 2048", "128 512", "256 1024")
"""Batches that share nothing: requests, then tokens of each."""

SHARED = (
    "1,10 4000,400", "1,32 4000,1", "1,256 4000,1", "1,10,10 1000,200,100", "1,256 256,32",
    "1,16,64 1024,256,32", "1,4,16,512 1024,256,128,32", "1,8 120000,512", "1,64 16384,64",
    "1,128 4096,64", "1,6,48 2000,8000,200", "1,16,32,64,128,1024 256,128,64,16,16,16",
    "1,2,4,8,16,32,64,128,1024 16,16,16,16,16,16,16,16,16",
)  # fmt: skip
"""Trees of the papers and of servers: nodes a level, then tokens of each node."""


@dataclass(frozen=True)
class Grid:
    """Sizes of the measured launches."""

    # KV lengths of FlashForge's table.
    table_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    # Items of each tile shape: KV lengths, and items of a program.
    tile_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    tile_rounds: tuple[int, ...] = (1, 2, 4)
    # Partial results: the approximate number in a launch, and those of each query.
    result_counts: tuple[int, ...] = (64, 512, 2048, 8192)
    result_parts: tuple[int, ...] = (2, 8)
    # Contexts of FastTree's groups in tiles of ``TS_c`` tokens.
    fasttree_blocks: tuple[float, ...] = (0.25, 0.5, 1, 2, 8, 32)
    repetitions: int = 2  # Repetitions of FlashForge's table; the shortest time is used
    # Whole batches that two tables are compared on: nodes a level, then tokens of each node.
    trials: tuple[str, ...] = UNSHARED + SHARED

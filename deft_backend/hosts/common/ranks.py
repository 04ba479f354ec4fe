"""What all ranks of a server must decide alike."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed


def same_on_all_ranks(group: Any, mine: Sequence[object] | None) -> bool | None:
    """Whether `mine` is equal on every rank of a group; all its ranks must call this.

    - `group`: the host's tensor-parallel group; it communicates through CPU memory. None: one rank.
    - `mine`: This rank's decisions; equal decisions must have equal ``repr``. None if this rank has
      no tree attention.

    Returns None if some rank has no tree attention.
    """
    if group is None or group.world_size == 1:
        return None if mine is None else True
    digest = zlib.crc32(repr(mine).encode())
    # The least digest, and the largest one with its sign changed, in one exchange.
    flags = torch.tensor([int(mine is not None), digest, -digest], dtype=torch.int64)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    everywhere, least, most = flags.tolist()
    return least == -most if everywhere else None

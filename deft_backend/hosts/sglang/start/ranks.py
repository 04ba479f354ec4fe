"""Agreement of a server's tensor-parallel ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from deft_backend.hosts.sglang.versions import tensor_parallel_group


def same_on_all_ranks(runner: Any, mine: Sequence[object] | None) -> bool | None:
    """Whether `mine` is equal on every rank of the model runner's group; all ranks must call this.

    Parameters
    ----------
    runner
        The host's model runner; its group communicates through CPU memory.
    mine : sequence, optional
        This rank's decisions; equal decisions must have equal ``repr``. None if this rank has no
        tree attention.

    Returns
    -------
    bool or None
        None if some rank has no tree attention.
    """
    group = tensor_parallel_group(runner)
    if group is None or group.world_size == 1:
        return None if mine is None else True
    digest = zlib.crc32(repr(mine).encode())
    # The least digest, and the largest one with its sign changed, in one exchange.
    flags = torch.tensor([int(mine is not None), digest, -digest], dtype=torch.int64)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    everywhere, least, most = flags.tolist()
    return least == -most if everywhere else None

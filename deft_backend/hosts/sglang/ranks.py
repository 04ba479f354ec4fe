"""Agreement of a server's tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from deft_backend.hosts.sglang.versions import tensor_parallel_group


def all_ranks(runner: Any, mine: bool) -> bool:
    """Whether `mine` is true on every rank of the model runner's group; all ranks must call this.

    Parameters
    ----------
    runner
        The host's model runner; its group communicates through CPU memory.
    mine : bool
        This rank's answer.
    """
    group = tensor_parallel_group(runner)
    if group is None or group.world_size == 1:
        return mine
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())

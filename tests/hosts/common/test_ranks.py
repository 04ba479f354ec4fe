"""What ranks decide alike, in two processes that exchange it as a server's ranks do."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from types import SimpleNamespace
import torch
from torch import distributed
from deft_backend.hosts.common.limits import same_on_all_ranks

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, cpu_group=None)
decisions = ("auto", torch.bfloat16, (128, 8), None)
for mine in (decisions, (*decisions, rank), None if rank else decisions, None):
    print(same_on_all_ranks(group, mine))
"""


def test_ranks_agree_whatever_their_hash_seeds(tmp_path):
    """Equal decisions, different ones, one rank without tree attention, and none with it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        printed, _ = process.communicate(timeout=120)
        assert printed.split() == ["True", "False", "None", "None"]

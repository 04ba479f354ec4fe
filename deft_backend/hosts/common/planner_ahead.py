"""Compile the host planner ahead, while a server loads its model.

Numba compiles it on one core, for many seconds. A process of its own does that, into Numba's cache
on disk. It holds a lock on a file; a server waits for the lock, and then loads the code. If the
process fails in any way, the server compiles by itself.
"""

import logging
import os
import signal
import subprocess
import sys
import threading

from deft_backend.files.folders import create_private, planner_lock
from deft_backend.files.locks import locked

logger = logging.getLogger("deft_backend")

LIFETIME = 120  # seconds until the process ends in any case


def start() -> None:
    """Start the process. Of several at a time, for example of a server's ranks, one compiles."""
    # Triton's interpreter stands in for a GPU; no kernel runs.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    silent = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment, stdin=silent, stdout=silent, stderr=silent,
        )  # fmt: skip
        # Somebody must wait for the process, or it stays as a zombie.
        threading.Thread(target=process.wait, name="deft-planner-ahead", daemon=True).start()
    except Exception as error:
        logger.debug("deft: the host planner is not compiled ahead (%r)", error)


def _compile() -> None:
    os.nice(5)
    signal.alarm(LIFETIME)  # ends the process, also within a compiler
    create_private(planner_lock().parent)
    with locked(planner_lock(), 0.0) as first:
        if not first:
            return
        import torch  # under the lock: this import takes seconds

        from deft_backend.attention import TreeAttention
        from deft_backend.hosts.common.warm_up import compile_host_planner
        from deft_backend.settings.config import Settings

        attention = TreeAttention(
            num_query_heads=1, num_kv_heads=1, head_dim=64, dtype=torch.float32, device="cpu",
            max_batch=4, policy=Settings.from_env().policy,
        )  # fmt: skip
        compile_host_planner(attention)


if __name__ == "__main__":
    _compile()

"""Settings of every test: one thread, and the adapters of installed hosts only."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Threads of an operation would wait for each other longer than they compute. NumPy and PyTorch read
# the number when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

collect_ignore_glob = [
    path.format(host)
    for host in ("sglang", "vllm")
    if find_spec(host) is None
    for path in ("deft_backend/hosts/{}/*", "tests/support/{}_*.py")
]

"""Settings for all tests: no downloads, checked integers, and the profiles of hypothesis.

The same commit draws the same examples, so that a change answers for its own failures alone.
`DEFT_RANDOM_TESTS=1` draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

from deft_backend.compile import triton_kernel

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("random", deadline=None, print_blob=True)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("random" if os.environ.get("DEFT_RANDOM_TESTS") == "1" else "repeatable")

triton_kernel.check_overflow = True

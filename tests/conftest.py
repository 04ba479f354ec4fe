"""Settings for all tests: no downloads, checked integers, and one profile for hypothesis."""

from __future__ import annotations

import os

from hypothesis import settings

from deft_backend.compile import triton_kernel

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("deft", deadline=None, print_blob=True)
settings.load_profile("deft")

triton_kernel.check_overflow = True

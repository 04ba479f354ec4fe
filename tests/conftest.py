"""Settings for all tests: no downloads, checked integers, and the profiles of hypothesis.

The same commit draws the same examples, so that a change answers for its own failures alone; the
edges are pinned by `@example`. `make draws` draws new ones, and prints how to draw them again.
"""

import os

import pytest
from hypothesis import settings

import quick_interpreter
from deft_backend.compile import triton_kernel, variants

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("random", deadline=None, print_blob=True, database=None)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("random" if os.environ.get("DEFT_RANDOM_TESTS") == "1" else "repeatable")

triton_kernel.check_overflow = True
quick_interpreter.install()


@pytest.fixture(autouse=True)
def _nothing_records():
    """A recorder that a test leaves behind would swallow every launch of later tests."""
    yield
    assert variants.recorder is None

"""Settings for all tests: no downloads, checked integers, and the profiles of hypothesis.

The same commit draws the same examples, so that a change answers for its own failures alone; the
edges are pinned by `@example`. `make draws` draws new ones, and prints how to draw them again.
"""

import os
from contextlib import nullcontext

import pytest
from hypothesis import settings
from triton import knobs

import quick_interpreter
from deft_backend.compile import triton_kernel, variants
from deft_backend.costs import table_lookup

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("random", deadline=None, print_blob=True, database=None)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("random" if os.environ.get("DEFT_RANDOM_TESTS") == "1" else "repeatable")

unchecked_integers = triton_kernel.unchecked_integers
triton_kernel.unchecked_integers = nullcontext
quick_interpreter.install()


@pytest.fixture(name="unchecked_integers")
def _unchecked_integers():
    """What launches outside of tests run in."""
    return unchecked_integers


@pytest.fixture(autouse=True)
def _new_process():
    """Warnings come again. A recorder that stays would swallow every launch of later tests."""
    table_lookup._warn_once.cache_clear()
    yield
    assert variants.recorder is None


@pytest.fixture
def triton_cache(tmp_path):
    """The folder of Triton's cache, empty."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "triton")
        yield tmp_path / "triton"

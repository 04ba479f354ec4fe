"""Answers over a KV cache in FP8 equal the model's over such a cache."""

from pathlib import Path

import pytest
import torch

from integration_tests.common.answers import PREFIX, TOPICS, check, on
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL, Ask, together

needs_avx512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="the host's own FP8 needs AVX-512"
)


@needs_avx512
@on("fp8")
def test_answers_over_an_fp8_cache(server):
    """Each decode step is also compared with the host's kernel over the same cache."""
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=12, logprobs=5) for t in TOPICS]
    asks = [asks[0], together(asks[1:])]
    check(server, PlainModel(MODEL, torch.float8_e4m3fn), asks)
    state = server.state()
    assert state["steps_tree"] > 0
    assert state["dtype_bytes"] == 1

"""Answers over a KV cache in FP8 equal the model's over such a cache, and the host's own."""

from pathlib import Path

import pytest
import torch

from integration_tests.common.answers import PREFIX, TOPICS, assert_same
from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import EAGER, MODEL, Ask, Group, together
from integration_tests.hosts import running

FP8 = Group(
    ("--block-size", "32", "--max-model-len", "1024", "--kv-cache-dtype", "fp8"),
    EAGER,
)
CLOSE = 0.1
"""Nats. On the CPU, the host's kernel computes with fewer bits over such a cache. Tree attention
differs from the model by less than 0.001."""

needs_avx512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="the host's own FP8 needs AVX-512"
)


def same_or_tied(ours, theirs):
    """Tokens that agree until the first one where two tokens are nearly equally likely."""
    agreed = 0
    for mine, other, a, b, likeliest in zip(
        ours.token_texts,
        theirs.token_texts,
        ours.logprobs,
        theirs.logprobs,
        theirs.likeliest,
        strict=True,
    ):
        assert a == pytest.approx(b, abs=CLOSE)
        if mine != other:
            assert likeliest.get(mine, -100.0) == pytest.approx(b, abs=CLOSE)
            break
        agreed += 1
    return agreed


@needs_avx512
@pytest.mark.xdist_group("fp8")
def test_answers_over_an_fp8_cache(tmp_path):
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=12, logprobs=5) for t in TOPICS]
    asks = [asks[0], together(asks[1:])]
    answers = {}
    for backend in (None, "deft"):
        with running(backend, FP8, tmp_path / str(backend)) as server:
            found = server.complete(asks)
            answers[backend] = [a for some in found for a in some]
            assert not server.trouble()
            if backend == "deft":
                expected = PlainModel(MODEL, torch.float8_e4m3fn).answers(asks)
                assert_same(asks, found, expected)
                state = server.state()
                assert state["steps_tree"] > 0
                assert state["dtype_bytes"] == 1
    agreed = [same_or_tied(*pair) for pair in zip(answers["deft"], answers[None], strict=True)]
    assert sum(agreed) >= 6 * len(agreed)

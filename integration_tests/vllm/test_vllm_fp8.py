"""Answers over a KV cache in FP8 equal those of the host's own backend over such a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.common.answers import PREFIX, TOPICS
from integration_tests.common.server import Answer
from integration_tests.vllm.vllm_server import Ask, Group, running, together

FP8 = Group(
    ("--block-size", "32", "--max-model-len", "1024", "--kv-cache-dtype", "fp8"),
    {"DEFT_MIN_BATCH": "1"},
)
CLOSE = 0.1
"""Nats. Keys and values round to 3 bits of mantissa, and a last bit before that may round them
differently: so likelihoods differ more than over other caches."""

needs_avx512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="the host's own FP8 needs AVX-512"
)


def same_or_tied(ours: Answer, theirs: Answer) -> int:
    """Tokens that agree until the first one where two tokens are nearly equally likely."""
    agreed = 0
    for mine, other, a, b, likeliest in zip(
        ours.token_texts, theirs.token_texts, ours.logprobs, theirs.logprobs, theirs.likeliest,
        strict=True,
    ):  # fmt: skip
        assert a == pytest.approx(b, abs=CLOSE)
        if mine != other:
            assert likeliest.get(mine, -100.0) == pytest.approx(b, abs=CLOSE)
            break
        agreed += 1
    return agreed


@needs_avx512
@pytest.mark.xdist_group("fp8")
def test_answers_over_an_fp8_cache(tmp_path: Path, adapter: Path) -> None:
    asks = [Ask(PREFIX + f"Tonight it spoke of {t}.", tokens=12, logprobs=5) for t in TOPICS]
    asks = [asks[0], together(asks[1:])]
    answers = {}
    for backend in (None, "deft"):
        folder = tmp_path / str(backend)
        folder.mkdir()
        with running(backend, FP8, folder, adapter) as server:
            answers[backend] = [a for some in server.complete(asks) for a in some]
            assert not server.trouble()
            if backend == "deft":
                state = server.state()
                assert state["steps_tree"] > 0
                assert state["dtype_bytes"] == 1
    agreed = [same_or_tied(*pair) for pair in zip(answers["deft"], answers[None], strict=True)]
    assert sum(agreed) >= 6 * len(agreed)

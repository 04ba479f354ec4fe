"""The model in plain PyTorch against transformers' Llama, and the check of sampled answers."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.e2e.checked_answers import save_samples
from benchmarks.e2e.choice import ChoiceError
from benchmarks.e2e.own_process import ProcessFailed
from benchmarks.e2e.plain_check import Names, arithmetic_of, check_in_process
from benchmarks.e2e.served_model import write_model
from benchmarks.plain_answers import check
from benchmarks.plain_llama import Arithmetic, PlainLlama

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
EXACT = Arithmetic(torch.float32, torch.float32, coarse_prompts=False)
PROMPT, ANSWER = [3, 999, 17, 4, 256, 81, 7], [12, 700, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_model(path, "tiny", "random", "float32")
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def log_probs(model, prompt, answer):
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def test_it_is_the_llama_of_transformers(folder, theirs):
    ours = PlainLlama(folder, EXACT, CPU)
    expected = log_probs(theirs, PROMPT, ANSWER)
    torch.testing.assert_close(ours.log_probs(PROMPT, ANSWER), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_and_values_are_rounded_as_the_cache_rounds_them(cache, folder, theirs):
    def rounded(module, q, k, v, mask, **options):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        k, v = k.to(cache).to(k.dtype), v.to(cache).to(v.dtype)
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    transformers.AttentionInterface.register("rounded", rounded)
    transformers.AttentionMaskInterface.register(
        "rounded", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    exact = log_probs(theirs, PROMPT, ANSWER)
    theirs.set_attn_implementation("rounded")
    try:
        expected = log_probs(theirs, PROMPT, ANSWER)
    finally:
        theirs.set_attn_implementation("sdpa")
    assert (expected - exact).abs().max() > 0.01
    ours = PlainLlama(folder, Arithmetic(torch.float32, cache, coarse_prompts=False), CPU)
    # A key that float32 moves over the middle of two stored numbers becomes the other one.
    torch.testing.assert_close(ours.log_probs(PROMPT, ANSWER), expected, atol=0.02, rtol=0)


def test_prompts_are_computed_once_and_in_parts(folder, monkeypatch):
    """What it keeps, and how it cuts prompts, changes nothing."""
    fresh = PlainLlama(folder, EXACT, CPU)
    expected = fresh.log_probs([*PROMPT, 44, 45], ANSWER)
    monkeypatch.setattr("benchmarks.plain_llama.QUERIES_AT_ONCE", 2)
    monkeypatch.setattr("benchmarks.plain_llama.TOKENS_AT_ONCE", 3)
    ours = PlainLlama(folder, EXACT, CPU)
    for before in ([*PROMPT, 1, 2, 3], PROMPT[:2], [*PROMPT, 44, 45], [*PROMPT, 44, 45, 6]):
        ours.log_probs(before, ANSWER)
        found = ours.log_probs([*PROMPT, 44, 45], ANSWER)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_coarse_prompts_round_queries_and_weights_of_prompts_alone(folder):
    cache = torch.float8_e4m3fn
    fine = PlainLlama(folder, Arithmetic(torch.float32, cache, coarse_prompts=False), CPU)
    coarse = PlainLlama(folder, Arithmetic(torch.float32, cache, coarse_prompts=True), CPU)
    assert (fine.log_probs(PROMPT, ANSWER) - coarse.log_probs(PROMPT, ANSWER)).abs().max() > 0.01
    # The first token attends to itself alone, so queries and weights do not matter there.
    torch.testing.assert_close(
        fine.log_probs([5], ANSWER), coarse.log_probs([5], ANSWER), atol=1e-5, rtol=0
    )


def test_a_wrong_token_of_an_answer_is_found(folder, tmp_path):
    model = PlainLlama(folder, EXACT, CPU)
    samples = []
    for prompt in (tuple(PROMPT), (*PROMPT[:4], 9), (77,)):
        answer = []
        for _ in range(6):
            answer.append(int(model.log_probs(prompt, [*answer, 0])[-1].argmax()))
        samples.append((prompt, answer))
    names = Names("float32", "float32", coarse_prompts=False)
    found = check(samples, str(folder), names, 1e-3)
    assert (found.answers, found.tokens, found.ties, found.wrong) == (3, 18, [], [])
    samples[1][1][3] = (samples[1][1][3] + 1) % 1000
    found = check(samples, str(folder), names, 1e-3)
    assert found.wrong[0].startswith(f"answer 1 (5 tokens before), token 3: {samples[1][1][3]} ")

    save_samples(tmp_path / "samples", samples)
    launch = SimpleNamespace(
        host=SimpleNamespace(on_gpu=lambda: False, name="sglang"), options=(), environment={},
        model=SimpleNamespace(path=str(folder)),
    )  # fmt: skip
    result = check_in_process(launch, tmp_path / "samples", 0.0)
    assert (result["answers"], result["tokens"], result["against"]) == (3, 18, "pytorch")
    assert result["wrong"] == len(found.wrong)
    (tmp_path / "samples").write_text("[]]")
    with pytest.raises(ProcessFailed, match=r"(?s)ended with 1: .*JSONDecodeError"):
        check_in_process(launch, tmp_path / "samples", 0.0)


def launch_of(folder, host, options, fallback=""):
    return SimpleNamespace(
        host=SimpleNamespace(on_gpu=lambda: True, name=host), options=options,
        environment={"DEFT_FALLBACK_BACKEND": fallback} if fallback else {},
        model=SimpleNamespace(path=str(folder)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("host", "options", "fallback", "expected"),
    [
        ("sglang", (), "", ("bfloat16", "bfloat16", False)),
        ("vllm", ("--dtype", "half"), "", None),
        ("sglang", ("--kv-cache-dtype", "fp8_e4m3"), "fa3", ("bfloat16", "float8_e4m3fn", True)),
        ("sglang", ("--kv-cache-dtype=fp8_e4m3",), "", ("bfloat16", "float8_e4m3fn", True)),
        ("sglang", ("--kv-cache-dtype=fp8_e4m3",), "triton", None),
        ("sglang", ("--kv-cache-dtype=fp8_e5m2",), "", None),  # fa3 has no e5m2
        ("vllm", ("--kv-cache-dtype", "fp8"), "", None),
    ],
)
def test_it_computes_as_the_server_does_or_refuses(
    host, options, fallback, expected, folder, monkeypatch
):
    monkeypatch.delenv("DEFT_FALLBACK_BACKEND", raising=False)
    launch = launch_of(folder, host, options, fallback)
    if expected is None:
        with pytest.raises(
            ChoiceError, match=r"does not know the arithmetic of .*expected bfloat16"
        ):
            arithmetic_of(launch)
    else:
        assert arithmetic_of(launch) == expected

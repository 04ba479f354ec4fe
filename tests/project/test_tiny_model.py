"""The tiny model in ``models/tiny-llama``: the properties that the demo and the tests need."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="the tiny model is read through transformers, which is not installed"
)

FOLDER = Path(__file__).parents[2] / "models" / "tiny-llama"
# Neighbouring bfloat16 values are at most 1/8 apart at the size of these logits, so that a lead
# of 1 survives the rounding errors of any attention backend.
CONFIDENT_LEAD = 1.0

PROMPTS = {
    "Sort the digits 8 2 5 1.": "1 2 5 8.",
    "The town of Galdry stands on": (
        "the river Sorrel. Its ruler is Duke Hale. "
        "The people of Galdry sell boats and eat seed bread."
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER).float().eval()


@pytest.mark.parametrize(("prompt", "expected"), PROMPTS.items(), ids=("sort", "town"))
def test_greedy_continuation_is_right_and_confident(tokenizer, model, prompt, expected):
    tokens = tokenizer.encode(prompt)
    leads = []
    with torch.inference_mode():
        inputs, cache = torch.tensor([tokens]), None
        for _ in range(len(expected) + 1):
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            best, second = output.logits[0, -1].topk(2).values.tolist()
            leads.append(best - second)
            tokens.append(int(output.logits[0, -1].argmax()))
            inputs = torch.tensor([tokens[-1:]])
    assert tokenizer.decode(tokens)[len(prompt) :].strip() == expected
    assert min(leads) > CONFIDENT_LEAD

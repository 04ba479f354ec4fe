"""The trained model's checkpoint and perplexity, with small stand-ins for both."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.real_model.perplexity import Decoder, cut, python_manual

TINY = Path(__file__).parents[2] / "models" / "tiny-llama"


def test_perplexity_is_that_of_the_whole_text_at_once():
    """The reference computes each continuation behind the shared text in one pass, in float32."""
    text = cut(list(python_manual().encode()[:200]), shared=37, continuations=3, length=9)
    decoder = Decoder(TINY, torch.float32, torch.device("cpu"), text)
    transformers = pytest.importorskip("transformers")
    llama = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    total = 0.0
    for tokens in text.continuations:
        with torch.inference_mode():
            logits = llama(torch.tensor([[*text.shared, *tokens]])).logits[0]
        scores = logits[len(text.shared) - 1 : -1].log_softmax(-1)
        total += float(scores.gather(1, torch.tensor(tokens)[:, None]).sum())
    wanted = math.exp(-total / text.tokens)
    assert decoder.perplexity(None) == pytest.approx(wanted, rel=1e-4)
    tree = decoder.attention("auto")
    assert decoder.perplexity(tree) == pytest.approx(wanted, rel=1e-4)

"""Why GPU tests allow answers of random adapters more rounding than the base's."""

import json

import torch
from safetensors.torch import load_file

from benchmarks import plain_llama
from benchmarks.e2e.random_weights import write_weights
from benchmarks.e2e.served_model import SHAPES
from benchmarks.plain_llama import Arithmetic, PlainLlama
from integration_tests.common.adapter import write_adapter
from integration_tests.gpu.checked_variants import NOISE

SMALL = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
         "intermediate_size": 1024, "vocab_size": 2048}  # fmt: skip


def scores(model, ids):
    hidden, _ = model._extend(
        ids, 0, coarse=True
    )  # rounds the softmax weights to the cache's dtype
    return model._norm(hidden, "model.norm") @ model._weights["lm_head.weight"].T


@torch.no_grad()
def test_an_adapter_enlarges_the_rounding_of_softmax_weights(tmp_path, monkeypatch):
    """Two kernels scale these weights in different ways before they round them to bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["four-layers"], **SMALL}))
    write_weights(tmp_path, seed=0)
    bfloat16 = Arithmetic(torch.bfloat16, torch.bfloat16, coarse_prompts=True)
    model = PlainLlama(tmp_path, bfloat16, torch.device("cpu"))
    ids = torch.randint(SMALL["vocab_size"], (384,), generator=torch.manual_seed(0)).tolist()

    def difference():
        found = []
        for scale in (256.0, 360.0):
            monkeypatch.setattr(plain_llama, "WEIGHT_RANGE", scale)
            found.append(scores(model, ids))
        return (found[0] - found[1]).square().mean().sqrt()

    base = difference()
    write_adapter(tmp_path / "adapter", tmp_path)
    added = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in [name for name in added if name.endswith("lora_A.weight")]:
        weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
        model._weights[weight] += added[name.replace("lora_A", "lora_B")] @ added[name]
    assert 1.3 < difference() / base <= NOISE

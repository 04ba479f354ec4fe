"""The trained model's checkpoint and perplexity, with small stand-ins for both."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.real_model.checkpoint import make_checkpoint
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


@pytest.fixture
def gguf(monkeypatch):
    """A reader of a made-up file: a Llama of one layer, two heads of 4 and one KV head."""
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd": (6, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8), "blk.0.ffn_gate": (10, 8), "blk.0.ffn_up": (10, 8),
        "blk.0.ffn_down": (8, 10),
    }  # fmt: skip
    values = {name: generator.normal(size=shape) for name, shape in shapes.items()}
    fields = {
        "general.architecture": "llama", "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1, "llama.embedding_length": 8,
        "llama.feed_forward_length": 10, "llama.block_count": 1, "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "c"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "",
    }  # fmt: skip
    module = ModuleType("gguf")
    module.GGUFReader = lambda path: SimpleNamespace(
        fields={n: SimpleNamespace(contents=lambda v=v: v) for n, v in fields.items()},
        tensors=[
            SimpleNamespace(name=f"{n}.weight", data=v, tensor_type=0) for n, v in values.items()
        ],
    )
    module.dequantize = lambda data, kind: data
    monkeypatch.setitem(sys.modules, "gguf", module)
    return {"fields": fields, "values": values}


def test_a_checkpoint_has_rotary_halves_in_order(gguf, tmp_path):
    """GGUF keeps row 2i and 2i + 1 of a head where transformers keeps rows i and i + dim / 2."""
    folder = make_checkpoint(Path("any"), tmp_path / "made", torch.float32)
    stored = load_file(folder / "model.safetensors")
    query = torch.tensor(gguf["values"]["blk.0.attn_q"]).float()
    for head in range(2):
        mine = stored["model.layers.0.self_attn.q_proj.weight"][4 * head : 4 * head + 4]
        theirs = query[4 * head : 4 * head + 4]
        assert torch.equal(mine, theirs[[0, 2, 1, 3]])
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    config = json.loads((folder / "config.json").read_text())
    assert (config["head_dim"], config["num_key_value_heads"]) == (4, 1)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abc").ids == [4, 5]

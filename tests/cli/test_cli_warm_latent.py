"""`deft warm` for models with latent attention (MLA): with a server's settings, without a GPU."""

import json
from functools import partial

import pytest
import torch
from triton import knobs

from attention_checks import latent_attention
from commands import run
from deft_backend.attention import Gpu
from deft_backend.compile.kernel_folder import Origin, Taken, take
from deft_backend.compile.variants import compile_all, compiling_for, recorded

warm = partial(run, "warm", COLUMNS="200")
ON = {"DEFT_MLA": "1"}
CONFIG = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def model(folder, **fields):
    """A folder with the configuration of DeepSeek-V2-Lite, as far as its attention needs it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return str(folder)


def launched(host, heads, batch, query_tokens):
    """What a server of this host launches in a step of some requests."""
    integers = {"sglang": torch.int64, "vllm": torch.int32}[host]
    size = {"page_size": {"sglang": 1, "vllm": 16}[host], "max_batch": batch}
    kinds = {"num_query_heads": heads, "dtype": torch.bfloat16, "compiled_for": Gpu.named("sm_90")}
    attention = latent_attention(kernel=None, query_tokens=query_tokens, **size, **kinds)
    rows, lens = (torch.ones(batch, dtype=integers) for _ in range(2))
    q = torch.zeros(batch * query_tokens, heads, 576, dtype=torch.bfloat16)
    table = torch.zeros((batch, 32), dtype=torch.int32)
    with recorded() as variants:
        attention.plan_on_device(table, lens, table_rows=rows)
        cache = torch.zeros(64, attention.shape.page_size, 576, dtype=torch.bfloat16)
        attention.run(q[..., :512], q[..., 512:], cache, table, sm_scale=1.0)
    return list(variants)


@pytest.mark.parametrize(
    ("host", "options", "heads", "query_tokens", "said"),
    [
        ("vllm", ["--tensor-parallel", "2"], 8, 1, "8 heads, bfloat16, pages of 16 on vllm"),
        ("sglang", ["--draft-tokens", "2"], 16, 2, "on sglang, chains of 2 query tokens"),
    ],
)
def test_a_server_finds_its_kernels_in_the_folder(
    host, options, heads, query_tokens, said, tmp_path
):
    folder = tmp_path / "kernels"
    of = ("--model", model(tmp_path / "model"), "--target", "sm_90", "--host", host)
    code, out, err = warm(*of, "--max-batch", "5", "--out", str(folder), *options, **ON)
    assert (code, err) == (0, "")
    assert f"kernels for sm_90: latent attention of {heads} heads" in out
    assert said in out
    count = len(json.loads((folder / "manifest.json").read_text())["kernels"])
    variants = launched(host, heads, 3, query_tokens)  # the folder may be for larger batches
    assert {"lay_out", "gather_queries", "merge_results"} < {each.name for each in variants}
    with knobs.cache.scope(), compiling_for(90):
        knobs.cache.dir = str(tmp_path / "triton")
        assert take(folder, Origin.of("sm_90")) == Taken(copied=count, held=0, damaged=0)
        done = compile_all(variants)
    assert (done.compiled, done.cached) == (0, len(variants))


@pytest.mark.parametrize(
    ("fields", "options", "settings", "said"),
    [
        ({}, [], {"DEFT_MLA": "0"}, "DEFT_MLA=0 leaves MLA models to the host's backend; set what"),
        ({}, [], {**ON, "DEFT_POLICY": "fasttree"}, "DEFT_POLICY is fasttree, and MLA takes"),
        ({}, ["--heads", "16/16"], ON, "--heads and --model both set the shape"),
        ({}, ["--kv-cache-dtype", "fp8_e4m3"], ON, "--kv-cache-dtype is fp8_e4m3, and MLA reads"),
        ({}, ["--draft-tokens", "2", "--draft-trees"], ON, "servers verify MLA's chains alone"),
        ({}, ["--draft-tokens", "4"], ON, "64 query vectors a request (16 heads, 4 query tokens)"),
        ({}, ["--tensor-parallel", "3"], ON, "expected a divisor of the 16 query heads"),
        ({}, ["--target", "sm_80"], ON, "MLA needs a GPU of compute capability 9.0"),
        ({"index_topk": 2048}, [], ON, "is sparse, which is not supported"),
        ({"kv_lora_rank": 256}, [], ON, "MLA of rank 256 + 64; expected 512 + 64"),
        ({"torch_dtype": "float32"}, [], ON, "the model's dtype is float32; pass --dtype"),
    ],
)
def test_what_a_server_would_leave_to_the_host_is_refused(
    fields, options, settings, said, tmp_path
):
    target = () if "--target" in options else ("--target", "sm_90")
    of = ("--model", model(tmp_path / "model", **fields), *target, "--host", "sglang")
    code, _, err = warm(*of, "--out", str(tmp_path / "kernels"), *options, **settings)
    assert code == 2
    assert said in err
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_a_model_without_heads_of_its_own_has_no_shape(command, tmp_path):
    code, _, err = run(command, "--model", model(tmp_path / "model"), COLUMNS="200")
    assert code == 2
    assert "has latent attention (MLA), so its heads have no keys and values of their own" in err

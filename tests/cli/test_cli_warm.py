"""`deft warm`: fills a folder without a GPU, and refuses what no server could use; MLA, too."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from triton import knobs

from attention_checks import latent_attention
from commands import run
from deft_backend.compile.kernel_folder import Origin, Taken, take
from deft_backend.compile.variants import compile_all, compiling_for, recorded
from deft_backend.hosts.common.described_server import DescribedServer
from deft_backend.hosts.common.warm_up import LayerKind
from deft_backend.kernels import Gpu
from deft_backend.settings.config import Settings

warm = partial(run, "warm", COLUMNS="200")
MODEL = Path(__file__).parents[2] / "models" / "tiny-llama"


MLA = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
"""The configuration of DeepSeek-V2-Lite, as far as its attention needs it."""
ON = {"DEFT_MLA": "1"}


def mla_model(folder, **fields):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MLA | fields))
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


def described_launches():
    """What a server with ordinary heads launches in batches of at most two requests."""
    server = DescribedServer("sglang", 32, 4, 128, torch.bfloat16, 1, 2)
    return server.variants(Gpu.named("sm_90"), Settings())


@pytest.mark.parametrize(
    ("mla", "arguments", "said", "variants"),
    [
        (
            *(False, "--heads 64/8 --tensor-parallel 2 --host sglang --max-batch 2"),
            "DescribedServer(host='sglang', num_query_heads=32, num_kv_heads=4, head_dim=128, ",
            described_launches,
        ),
        (
            *(True, "--tensor-parallel 2 --host vllm --max-batch 5"),
            "DescribedLatentServer(host='vllm', num_query_heads=8, ",
            partial(launched, "vllm", 8, 3, 1),  # the folder may be for larger batches
        ),
        (
            *(True, "--draft-tokens 2 --host sglang --max-batch 5"),
            "DescribedLatentServer(host='sglang', num_query_heads=16, ",
            partial(launched, "sglang", 16, 3, 2),
        ),
    ],
    ids=["heads", "MLA", "MLA-drafts"],
)
def test_a_server_finds_its_kernels_in_the_folder(mla, arguments, said, variants, tmp_path):
    folder = tmp_path / "kernels"
    model = ("--model", mla_model(tmp_path / "model")) if mla else ()
    where = {"DEFT_KERNEL_CACHE": str(folder), **ON}
    code, out, err = warm("--target", "sm_90", *arguments.split(), *model, **where)
    assert (code, err) == (0, "")
    assert f"for sm_90: {said}" in out
    count = len(json.loads((folder / "manifest.json").read_text())["kernels"])
    assert f"{folder} holds {count} kernels" in out.replace("\n", "")
    assert f"{count} compiled on " in out
    wanted = variants()
    names = {each.name for each in wanted}
    assert mla == ({"lay_out", "gather_queries", "merge_results"} < names)
    assert mla or count == len(wanted)
    with knobs.cache.scope(), compiling_for(90):
        knobs.cache.dir = str(tmp_path / "triton")
        assert take(folder, Origin.of("sm_90")) == Taken(copied=count, held=0, damaged=0)
        done = compile_all(wanted)
    assert (done.compiled, done.cached) == (0, len(wanted))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "h100"], "--target is 'h100'; expected one of sm_80"),
        (["--target", "sm_90", "--heads", "8"], "--heads is '8'; expected QUERY/KV"),
        (["--target", "sm_90", "--dtype", "fp8"], "--dtype is 'fp8'; expected fp16 or bf16"),
        (["--target", "sm_90", "--head-dim", "80"], "head dimension 80; supported are 64"),
        (["--target", "sm_90", "--tensor-parallel", "3"], "expected a divisor of the 32"),
        (["--target", "sm_90", "--host", "sglang", "--page-size", "16"], "pages of 1 token"),
        (["--target", "sm_90", "--host", "tgi"], "there is no host 'tgi'"),
        (["--target", "sm_90", "--model", str(MODEL), "--heads", "8/8"], "leave one of them out"),
        (["--target", "sm_90", "--model", "/no/such/folder"], "is not a folder"),
        (["--kv-cache-dtype", "int4"], "'int4'; expected one of auto, fp8_e4m3, fp8_e5m2: pass"),
        (["--kv-cache-dtype", "fp8"], "'fp8'; expected one of auto, fp8_e4m3, fp8_e5m2: pass"),
        (["--draft-trees"], "--draft-trees is given without --draft-tokens; pass"),
        (["--draft-tokens", "1"], "--draft-tokens is 1; expected 2 to 4096"),
        (["--draft-tokens", "4097"], "--draft-tokens is 4097; expected 2 to 4096"),
        (["--host", "vllm", "--draft-tokens", "4096"], "is 4096; expected 1 to 4095"),
        (["--host", "vllm", "--draft-trees", "--draft-tokens", "3"], "vLLM verifies chains only"),
    ],
)
def test_bad_input_is_named(arguments, said, tmp_path):
    check_refused(tmp_path, arguments, said)


def check_refused(folder, arguments, said, **settings):
    host = () if "--host" in arguments else ("--host", "sglang")
    code, _, err = warm(*arguments, *host, "--out", str(folder / "kernels"), **settings)
    assert code == 2
    assert said in err
    assert not (folder / "kernels").exists()


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
def test_mla_that_a_server_would_leave_to_the_host_is_refused(
    fields, options, settings, said, tmp_path
):
    target = () if "--target" in options else ("--target", "sm_90")
    arguments = ["--model", mla_model(tmp_path / "model", **fields), *target, *options]
    check_refused(tmp_path, arguments, said, **settings)


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_a_model_without_heads_of_its_own_has_no_shape(command, tmp_path):
    code, _, err = run(command, "--model", mla_model(tmp_path / "model"), COLUMNS="200")
    assert code == 2
    assert "has latent attention (MLA), so its heads have no keys and values of their own" in err


@pytest.fixture
def described(monkeypatch, tmp_path):
    """The server whose kernels `deft warm` would compile with some options, and what it prints."""
    seen = []

    def variants(self, *rest):
        seen.append(self)
        return []

    def describe(*arguments):
        out = ("--target", "sm_90", "--out", str(tmp_path / "kernels"))
        code, said, err = warm(*arguments, *out)
        assert (code, err) == (0, "")
        return seen[-1], said

    monkeypatch.setattr(DescribedServer, "variants", variants)
    return describe


def with_config(folder, **fields):
    """A model's folder: the tiny model's configuration in 16 bits, with other fields."""
    content = json.loads((MODEL / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content | {"dtype": "float16"} | fields))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "host", "expected"),
    [
        ({}, "vllm", LayerKind()),
        ({"attn_logit_softcapping": 50.0}, "sglang", LayerKind(soft_cap=True)),
        ({"attn_logit_softcapping": None}, "sglang", LayerKind()),
        ({"model_type": "gpt_oss"}, "sglang", LayerKind(sinks=torch.bfloat16)),
        ({"model_type": "gpt_oss"}, "vllm", LayerKind(sinks=torch.float16)),
        ({"add_full_attention_sink_bias": True}, "vllm", LayerKind(sinks=torch.float16)),
        ({"add_full_attention_sink_bias": False}, "vllm", LayerKind()),
    ],
)
def test_a_model_gives_the_kind_of_its_layers(fields, host, expected, described, tmp_path):
    model = with_config(tmp_path / "model", **fields)
    server, _ = described("--host", host, "--model", model)
    assert server.layers == (expected,)
    assert server.page_size == {"sglang": 1, "vllm": 16}[host]

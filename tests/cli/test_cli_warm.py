"""`deft warm`: fills a folder without a GPU, and refuses what no server could use."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from triton import knobs

from commands import run
from deft_backend.compile.kernel_folder import Origin, Taken, take
from deft_backend.compile.variants import compile_all, compiling_for
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


def test_a_server_finds_its_kernels_in_the_folder(tmp_path):
    """Batches of two need few kernels."""
    folder = tmp_path / "kernels"
    arguments = "--heads 64/8 --tensor-parallel 2 --host sglang --max-batch 2 --target sm_90"
    code, out, err = warm(*arguments.split(), DEFT_KERNEL_CACHE=str(folder))
    assert (code, err) == (0, "")
    assert "for sm_90: DescribedServer(host='sglang', num_query_heads=32, num_kv_heads=4, " in out
    count = len(json.loads((folder / "manifest.json").read_text())["kernels"])
    assert f"{folder} holds {count} kernels" in out.replace("\n", "")
    assert f"{count} compiled on " in out
    server = DescribedServer("sglang", 32, 4, 128, torch.bfloat16, 1, 2)
    wanted = server.variants(Gpu.named("sm_90"), Settings())
    assert count == len(wanted)
    with knobs.cache.scope(), compiling_for(90):
        knobs.cache.dir = str(tmp_path / "triton")
        assert take(folder, Origin.of("sm_90")) == Taken(copied=count, held=0, damaged=0)
        done = compile_all(wanted)
    assert (done.compiled, done.cached) == (0, count)


@pytest.mark.parametrize("command", ["doctor", "tune", "warm"])
def test_a_model_without_heads_of_its_own_has_no_shape(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    code, _, err = run(command, "--model", str(tmp_path), COLUMNS="200")
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


def test_a_server_has_the_pages_and_a_ranks_share_of_the_heads(described):
    given = "--host vllm --page-size 32 --heads 8/2 --tensor-parallel 4"
    server, _ = described(*given.split())
    assert (server.page_size, server.num_query_heads, server.num_kv_heads) == (32, 2, 1)

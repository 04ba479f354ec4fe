"""The model of a command: a folder, a hub name, or neither."""

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import pytest

from deft_backend.cli import models
from deft_backend.cli.shapes import model_shape
from integration_tests.common.hub import NAME, REVISION, write_hub_cache

TINY = Path(__file__).parents[2] / "models" / "tiny-llama"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache holds the tiny model, and requests to the hub fail."""
    write_hub_cache(tmp_path / "hf", TINY)
    cache = tmp_path / "hf" / "hub"
    # `huggingface_hub` reads its environment variables when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("variable", ["SGLANG_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE"])
def test_which_names_are_the_hub_s(variable, monkeypatch):
    assert models.is_hub_name("Qwen/Qwen3-8B")
    assert models.is_hub_name("gpt2")
    others = ("s3://bucket/model", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "/models/qwen", "a/b/c")
    assert not any(map(models.is_hub_name, others))
    monkeypatch.setenv(variable, "True")  # the names of another hub are the host's affair
    assert not models.is_hub_name("Qwen/Qwen3-8B")


def test_files_and_shapes_of_a_folder_and_of_a_hub_name_at_a_revision(hub):
    folder, name = models.ChosenModel(str(TINY)), models.ChosenModel(NAME, REVISION)
    assert folder.file("config.json") == TINY / "config.json"
    assert folder.file("nothing.json") is None
    found = name.file("config.json")
    assert found.is_relative_to(hub)
    assert found.read_bytes() == (TINY / "config.json").read_bytes()
    config = json.loads(found.read_text())
    assert model_shape(name) == model_shape(folder)
    assert model_shape(name)[:2] == (config["num_attention_heads"], config["num_key_value_heads"])
    for known in (name, folder, models.ChosenModel("s3://bucket/model")):
        known.check()
    with pytest.raises(models.ModelFilesError, match="someone/unknown is not a folder here"):
        models.ChosenModel("someone/unknown").check()


@pytest.mark.parametrize(
    ("revision", "error", "said"),
    [
        (
            None,
            huggingface_hub.errors.LocalEntryNotFoundError("x"),
            "m is not a folder .*: c.json is not in the hub's cache",
        ),
        ("v2", OSError("no\n route"), "m at revision v2 is not a folder here, .*: no route$"),
    ],
)
def test_why_the_hub_cannot_be_used(revision, error, said, monkeypatch):
    def fails(*given, **named):
        assert (given, named) == (("m", "c.json"), {"revision": revision})
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(models.ModelFilesError, match=said):
        models.ChosenModel("m", revision).file("c.json")


def test_what_a_text_model_leaves_to_its_kinds_defaults(tmp_path):
    """Its own dtype is that of its weights, whatever the dtype of the model around it."""
    text = {"model_type": "llama", "hidden_size": 512, "dtype": "bfloat16"}
    around = {"model_type": "llava", "dtype": "float16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(around))
    shape = model_shape(models.ChosenModel(str(tmp_path)))
    assert shape == (32, 32, 16, "bfloat16", False, False)


@pytest.mark.parametrize(
    ("behind", "revision"),
    [([], None), (["--revision", "v2"], "v2"), (["--seed", "1", "--revision=v2"], "v2")],
)
def test_the_model_has_the_revision_that_the_host_gets(behind, revision):
    assert models.served_model("a/b", behind) == models.ChosenModel("a/b", revision)


@pytest.mark.parametrize(
    ("config", "arguments", "context"),
    [
        ({"max_position_embeddings": 8192}, [], 8192),
        ({"text_config": {"max_position_embeddings": 4096}}, [], 4096),
        ({"max_position_embeddings": 8192}, ["--context-length", "2048"], 2048),
        ({"max_position_embeddings": 8192}, ["--max-model-len=64k"], None),
        ({"max_position_embeddings": 8192, "rope_scaling": {"factor": 4.0}}, [], None),
        ({"max_position_embeddings": "many"}, [], None),
        ([], [], None),
        (b"\xff\xfe{", [], None),
    ],
)
def test_the_context_of_a_server_before_it_starts(config, arguments, context, tmp_path):
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    (tmp_path / "config.json").write_bytes(content)
    assert models.served_context(models.ChosenModel(str(tmp_path)), arguments) == context

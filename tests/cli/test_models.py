"""The model of a command: a folder, a hub name, or neither."""

import json
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import typer

from deft_backend.cli.models import ChosenModel, chosen_model, served_context, served_model
from deft_backend.cli.shapes import model_shape
from deft_backend.tools.servers.model_files import ModelFilesError, is_hub_name, model_file
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
    assert is_hub_name("Qwen/Qwen3-8B")
    assert is_hub_name("gpt2")
    others = ("s3://bucket/model", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "/models/qwen", "a/b/c")
    assert not any(map(is_hub_name, others))
    monkeypatch.setenv(variable, "True")  # the names of another hub are the host's affair
    assert not is_hub_name("Qwen/Qwen3-8B")


def test_a_file_of_a_folder():
    assert model_file(str(TINY), "config.json") == TINY / "config.json"
    assert model_file(str(TINY), "nothing.json") is None


def test_a_file_of_a_hub_name_at_a_revision(hub):
    found = model_file(NAME, "config.json", REVISION)
    assert found is not None
    assert found.is_relative_to(hub)
    assert found.read_bytes() == (TINY / "config.json").read_bytes()


def test_the_shape_of_a_hub_name(hub):
    config = json.loads((TINY / "config.json").read_text())
    shape = model_shape(ChosenModel(NAME, REVISION))
    assert shape == model_shape(ChosenModel(str(TINY)))
    assert shape[:2] == (config["num_attention_heads"], config["num_key_value_heads"])


@pytest.mark.parametrize(("name", "revision"), [(NAME, None), (NAME, "v9"), ("no/such", None)])
def test_what_the_cache_lacks_offline(hub, name, revision):
    with pytest.raises(ModelFilesError) as raised:
        model_file(name, "config.json", revision)
    said = str(raised.value)
    assert said.startswith(f"{name} at revision {revision}" if revision else name)
    assert "HF_HUB_OFFLINE forbids to ask the hub. Download the model first" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "asks for permission to read it. Accept its terms"),
        ("RepositoryNotFoundError", "no such model, or a private one. Check the name"),
        ("RevisionNotFoundError", "no such revision of it. Check --revision"),
        ("LocalEntryNotFoundError", "the hub does not answer. Check the connection"),
        ("HFValidationError", "cannot be read from the hub: as the hub says"),
        ("OSError", "cannot be read from the hub: as the hub says"),
    ],
)
def test_what_the_hub_answers(error, said, monkeypatch):
    kind = OSError if error == "OSError" else getattr(huggingface_hub.errors, error)
    raised = kind.__new__(kind)
    raised.args = ("as the hub says",)

    def download(*arguments, **keywords):
        raise raised

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelFilesError, match=said):
        model_file("some/model", "config.json")


def test_a_file_that_the_hub_s_model_lacks(monkeypatch):
    error = huggingface_hub.errors.EntryNotFoundError

    def download(*arguments, **keywords):
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert model_file("some/model", "tokenizer.json") is None
    ChosenModel("some/model").check()  # another format, which the host reads


def test_without_huggingface_hub_a_name_cannot_be_looked_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFilesError, match="pip install huggingface_hub, or pass"):
        model_file("some/model", "config.json")


def test_a_name_that_nobody_can_look_up_has_no_shape(capsys):
    ChosenModel("s3://bucket/model").check()  # left to the host
    with pytest.raises(typer.Exit):
        model_shape(ChosenModel("s3://bucket/model"))
    assert "neither a folder nor a name on the Hugging Face hub" in capsys.readouterr().err


def test_what_a_class_knows_and_the_file_does_not(tmp_path):
    """Some configurations omit their class's default values."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    transformers = pytest.importorskip("transformers")
    known = transformers.Gemma3TextConfig()
    shape = model_shape(ChosenModel(str(tmp_path)))
    assert shape[:3] == (known.num_attention_heads, known.num_key_value_heads, known.head_dim)


@pytest.mark.parametrize(
    ("option", "behind", "revision", "arguments"),
    [
        (None, [], None, []),
        ("v2", ["--seed", "1"], "v2", ["--revision", "v2", "--seed", "1"]),
        (None, ["--revision", "v2"], "v2", ["--revision", "v2"]),
        (None, ["--revision=v2"], "v2", ["--revision=v2"]),
    ],
)
def test_the_revision_reaches_the_host(option, behind, revision, arguments):
    assert served_model("a/b", option, behind) == (ChosenModel("a/b", revision), arguments)


@pytest.mark.parametrize(
    ("model", "revision", "behind", "said"),
    [
        ("a/b", "v2", ["--revision", "v3"], "--revision is given twice: 'v2', and 'v3' behind"),
        (str(TINY), "v2", [], "is a folder; leave it out"),
        (None, "v2", [], "--revision is given without --model"),
        ("/no/such/folder", None, [], "/no/such/folder is not a folder; expected a checkpoint's"),
        ("a/b/c", None, [], "a/b/c is not a folder"),
        ("~no-such-user/model", None, [], "~no-such-user/model is not a folder"),
        ("", None, [], "the model is ''; expected a checkpoint's folder, or a hub name"),
        ("a/b", " ", [], "the revision is ' '; expected"),
    ],
)
def test_what_cannot_be_served(model, revision, behind, said, capsys):
    with pytest.raises(typer.Exit):
        served_model(model, revision, behind)
    assert said in capsys.readouterr().err.replace("\n", "")


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit):
        chosen_model("")
    assert chosen_model(".") == ChosenModel(".")


def test_a_name_too_long_for_a_path_is_a_name():
    assert chosen_model("a" * 5000).name == "a" * 5000


def test_files_in_other_formats_are_the_host_s_affair(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"")
    assert chosen_model(str(gguf)) == ChosenModel(str(gguf))
    (tmp_path / "params.json").write_text("{}")
    assert chosen_model(str(tmp_path)) == ChosenModel(str(tmp_path))


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
    assert served_context(ChosenModel(str(tmp_path)), arguments) == context

"""``--attention-backend deft``: the host's arguments, and the registration."""

import inspect
import re
import sys
from ast import literal_eval
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from deft_backend.hosts.sglang import arguments, factory, layers, plugin, versions
from deft_backend.settings.config import VARIABLES, SettingsError
from drawings import check_asked

SEEN = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
SEEN += ("speculative_draft_attention_backend", "max_running_requests")


def make_arguments(graphs="full", **changes):
    usual = {"attention_backend": "deft", "device": "cpu", "kv_cache_dtype": "auto"}
    usual["cuda_graph_config"] = SimpleNamespace(decode=SimpleNamespace(backend=graphs))
    return SimpleNamespace(**{**dict.fromkeys(SEEN), **usual, **changes})


def model(**config):
    """The host's description of a model."""
    text = SimpleNamespace(**config)
    return SimpleNamespace(is_encoder_decoder=False, num_attention_heads=64, hf_text_config=text)


MODELS = {
    "latent": model(),
    "sparse": model(index_topk=2048),
    "encoder": SimpleNamespace(is_encoder_decoder=True),
    "unknown": SimpleNamespace(),
}


def resolve_as_host(made):
    """What the host was asked for."""
    asked = {name: getattr(made, name) for name in SEEN}
    assert "deft" not in asked.values()
    made.attention_backend = made.attention_backend or "torch_native"
    return {name: value for name, value in asked.items() if value is not None}


@pytest.fixture(autouse=True)
def resolving(host, monkeypatch):
    plugin.surround_backends()

    def names(made):
        return (
            made.prefill_attention_backend or made.attention_backend,
            made.decode_attention_backend or made.attention_backend,
        )

    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(versions, "backend_names", names)
    monkeypatch.setattr(versions, "missing", lambda: None)  # read once: see the contract's test
    monkeypatch.setattr(versions, "uses_mla", lambda made: getattr(made, "mla", False))
    monkeypatch.setattr(
        versions, "model_config", lambda made: MODELS.get(getattr(made, "model", ""), model())
    )


def served(made):
    """Resolve as the host does; the backend that tree attention surrounds, or None."""
    arguments.resolve(resolve_as_host, made)
    return getattr(made, arguments.HOST_DECODE, None)


def test_what_becomes_of_a_servers_arguments(caplog, monkeypatch):
    """The host resolves as if the flag were not there: of each server, the file says what the host
    gets to resolve, what decodes, and what is logged. Words are arguments, or in capitals settings.
    """
    caplog.set_level("INFO", logger="deft_backend")

    def outcome(*words):
        settings, changes = {}, {}
        for name, _, value in (word.partition("=") for word in words):
            if name.isupper():
                settings[name] = value
                continue
            with suppress(ValueError):
                value = literal_eval(value)
            changes[name] = value
        made, version = make_arguments(**changes), settings.pop("VERSION", None)
        caplog.clear()
        with monkeypatch.context() as environment:
            if version is not None:
                environment.setattr("importlib.metadata.version", lambda name: version)
            for name, value in settings.items():
                environment.setenv(name, value)
            try:
                yield f"the host resolves {arguments.resolve(resolve_as_host, made)}"
            except SettingsError as error:
                yield re.sub("of .*triton.*", "of ... triton ...", str(error))
                return
        decodes = getattr(made, arguments.HOST_DECODE, "the host alone")
        yield f"{decodes} decodes, with graphs of the kind {versions.decode_graphs(made)}"
        for record in caplog.records:
            line = f"{record.levelname}: {record.getMessage()}"
            own = f"SGLang {versions.SGLANG.installed()}"
            yield line if version else line.replace(own, "this SGLang")

    check_asked(Path(__file__).with_name("servers.txt"), outcome)


def test_arguments_that_a_process_gets_resolved_and_models_without_backends(monkeypatch):
    """The first are the host's as they are. A placeholder model has nothing to decode."""
    made = make_arguments(_resolution_finished=True)
    assert arguments.resolve(lambda made: made.attention_backend, made) == "deft"
    monkeypatch.setattr(versions, "backend_names", lambda made: (None, None))
    made = make_arguments()
    assert served(made) is None
    assert versions.decode_graphs(made) == "full"


@pytest.mark.parametrize("variable", ["DEFT_POLICY", "DEFT_FALLBACK_BACKEND"])
def test_a_wrong_setting_of_a_command_line_is_the_last_line(variable, monkeypatch):
    """No traceback stands around the message."""
    monkeypatch.setenv(variable, "fastree")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--attention-backend", "deft"])
    with pytest.raises(SystemExit, match=f"deft: {variable} is 'fastree'; expected one of"):
        arguments.resolve(resolve_as_host, make_arguments())


def test_every_feature_of_the_host_that_is_refused(caplog):
    for name, words in arguments._FEATURES:
        caplog.clear()
        assert served(make_arguments(**{name: True})) is None
        assert f"{words} is not supported ({name}=True)" in caplog.text


def test_the_page_of_the_host_names_every_argument_that_is_refused():
    page = (Path(__file__).parents[3] / "docs" / "hosts-sglang.md").read_text(encoding="utf-8")
    table = page.partition("\n## Refused, and why\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert all(len(row) == 6 and all(cell.strip() for cell in row[1:5]) for row in rows)
    stated = {name for row in rows for name in re.findall("`(.*?)`", row[1])}
    refused = {name for name, _ in arguments._FEATURES}
    assert refused <= stated
    source = inspect.getsource(arguments) + inspect.getsource(layers)
    stated.remove("SGLANG_USE_HND_KVCACHE")  # seen in the pool: `use_hnd`
    assert not {name for name in stated if name not in source}


def test_a_host_that_lacks_a_member_is_left_alone(caplog, monkeypatch):
    monkeypatch.setattr(versions, "missing", lambda: "a module: a name")
    assert served(make_arguments()) is None
    assert "this SGLang lacks a member that tree attention uses (a module: a name)" in caplog.text


def test_backends_are_surrounded_once_and_later_plugins_have_the_hosts(monkeypatch, caplog):
    from sglang.srt.layers.attention import attention_registry as registry

    wrapped = []
    monkeypatch.setattr(
        factory, "wrap_backend", lambda runner, name, host: wrapped.append(name) or ("tree", host)
    )
    monkeypatch.setitem(registry.ATTENTION_BACKENDS, "theirs", lambda runner: "their backend")
    monkeypatch.setenv("DEFT_FALLBACK_BACKEND", "theirs")
    assert served(make_arguments()) is None
    assert "one of a plugin that SGLang loads after deft" in caplog.text
    for _ in range(2):
        plugin.surround_backends()
    made = make_arguments()
    assert served(made) == "theirs"
    create = registry.ATTENTION_BACKENDS["theirs"]
    assert create(SimpleNamespace(server_args=made)) == ("tree", "their backend")
    assert wrapped == ["theirs"]
    assert create(SimpleNamespace(server_args=SimpleNamespace())) == "their backend"
    monkeypatch.setitem(sys.modules, factory.__name__, None)
    assert create(SimpleNamespace(server_args=made)) == "their backend"
    assert "tree attention could not be loaded (ModuleNotFoundError" in caplog.text

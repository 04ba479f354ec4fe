"""``--attention-backend deft``: the host's arguments, and the registration."""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deft_backend.hosts.sglang import layers, versions
from deft_backend.hosts.sglang.arguments import _FEATURES
from deft_backend.hosts.sglang.versions import decode_graphs
from deft_backend.settings.config import SettingsError
from failure_lines import raising


def make_arguments(**changes):
    arguments = SimpleNamespace(
        attention_backend="deft",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_draft_attention_backend=None,
        device="cpu",
        kv_cache_dtype="auto",
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")),
    )
    return SimpleNamespace(**{**vars(arguments), **changes})


DENSE = SimpleNamespace(is_encoder_decoder=False)
"""The host's description of a model."""


def latent_model(**config):
    """The host's description of an MLA model with 64 heads."""
    return SimpleNamespace(
        is_encoder_decoder=False, num_attention_heads=64, hf_text_config=SimpleNamespace(**config)
    )


MLA = {"mla": True, "tp_size": 8, "model": latent_model()}
"""What differs in the arguments of a server with an MLA model."""


EAGLE = {"speculative_algorithm": "EAGLE"}
SPLIT = {
    "attention_backend": None,
    "decode_attention_backend": "deft",
    "prefill_attention_backend": "triton",
}

DETERMINISTIC = {"enable_deterministic_inference": True}
"""What differs in the arguments of a server whose results must not depend on the batch."""


SEEN = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
SEEN += ("speculative_draft_attention_backend", "max_running_requests")


def resolve_as_host(made):
    """What the host was asked for."""
    asked = {name: getattr(made, name, None) for name in SEEN}
    assert "deft" not in asked.values()
    made.attention_backend = made.attention_backend or "torch_native"
    return {name: value for name, value in asked.items() if value is not None}


@pytest.fixture
def arguments(host, monkeypatch):
    from deft_backend.hosts.sglang import arguments, plugin
    from deft_backend.settings.config import VARIABLES

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
    monkeypatch.setattr(versions, "model_config", lambda made: getattr(made, "model", DENSE))
    return arguments


def served(arguments, made):
    """Resolve as the host does; the backend that tree attention surrounds, or None."""
    arguments.resolve(resolve_as_host, made)
    return getattr(made, arguments.HOST_DECODE, None)


NATIVE, TRITON = "torch_native", {"attention_backend": "triton"}
OURS = {"attention_backend": None, "decode_attention_backend": "deft"}
FALLBACK = {"DEFT_FALLBACK_BACKEND": "triton"}
LIMIT = "max_running_requests"


@pytest.mark.parametrize(
    ("changes", "settings", "seen", "decodes"),
    [
        ({}, {}, {}, NATIVE),
        ({"attention_backend": "DEFT"}, {}, {}, NATIVE),  # in vLLM's capitals, too
        (OURS, {}, {}, NATIVE),
        ({**OURS, **TRITON}, {}, TRITON, "triton"),
        ({"attention_backend": None, "prefill_attention_backend": "deft"}, {}, {}, NATIVE),
        ({}, FALLBACK, TRITON, "triton"),
        ({**OURS, "attention_backend": "fa3"}, FALLBACK, {"attention_backend": "fa3"}, "fa3"),
        (DETERMINISTIC, {}, {LIMIT: 2048}, NATIVE),
        (DETERMINISTIC, {"DEFT_MAX_BATCH": "100"}, {LIMIT: 100}, NATIVE),
        ({**DETERMINISTIC, LIMIT: 9}, {}, {LIMIT: 9}, NATIVE),
        # Another backend is selected for decode.
        ({**TRITON, "prefill_attention_backend": "deft"}, {}, TRITON, None),
        ({**TRITON, "speculative_draft_attention_backend": "deft"}, {}, TRITON, None),
        (
            {**DETERMINISTIC, "decode_attention_backend": "triton"},
            {},
            {"decode_attention_backend": "triton"},
            None,
        ),
        (
            {**OURS, "decode_attention_backend": "triton", "prefill_attention_backend": "deft"},
            {},
            {"decode_attention_backend": "triton"},
            None,
        ),
    ],
)
def test_the_host_resolves_as_if_the_flag_were_not_there(
    arguments, caplog, monkeypatch, changes, settings, seen, decodes
):
    """A fallback replaces only the host's own choice. Plans must hold every batch of deterministic
    inference, so it limits the requests.
    """
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    made = make_arguments(**changes)
    assert arguments.resolve(resolve_as_host, made) == seen
    assert getattr(made, arguments.HOST_DECODE, None) == decodes
    assert decode_graphs(made) == ("full" if decodes is None else "disabled")
    assert ("another backend is selected for decode" in caplog.text) is (decodes is None)


def test_arguments_that_a_process_gets_resolved_and_models_without_backends(arguments, monkeypatch):
    """The first are the host's as they are. A placeholder model has nothing to decode."""
    made = make_arguments(_resolution_finished=True)
    assert arguments.resolve(lambda made: made.attention_backend, made) == "deft"
    monkeypatch.setattr(versions, "backend_names", lambda made: (None, None))
    made = make_arguments()
    assert served(arguments, made) is None
    assert decode_graphs(made) == "full"


@pytest.mark.parametrize(
    ("kind", "setting", "kept", "said"),
    [
        ("full", "UNUSED", "full", ""),
        ("full", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "full", ""),
        ("full", "SGLANG_ENABLE_METADATA_GLUE_GRAPH", "disabled", "hides replays from the"),
        ("breakable", "UNUSED", "disabled", "decode graphs are of the kind breakable"),
        ("breakable", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", None, "and SGLANG_ENABLE_POST"),
        ("full", "DEFT_VERIFY", "disabled", "DEFT_VERIFY compares every step with the host's"),
        ("disabled", "DEFT_VERIFY", "disabled", ""),
    ],
)
def test_decode_graphs_on_a_gpu(arguments, caplog, monkeypatch, kind, setting, kept, said):
    """Full graphs get a second set. Others are switched off, unless memory is sized by them."""
    monkeypatch.setenv(setting, "1")
    graphs = SimpleNamespace(decode=SimpleNamespace(backend=kind))
    made = make_arguments(device="cuda", cuda_graph_config=graphs)
    assert (served(arguments, made) is not None) == (kept is not None)
    assert decode_graphs(made) == (kept or kind)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_servers_that_do_not_ask_are_left_alone(arguments, monkeypatch):
    monkeypatch.setenv("DEFT_POLICY", "nonsense")
    made = make_arguments(attention_backend="triton")
    assert served(arguments, made) is None
    assert made.attention_backend == "triton"
    assert decode_graphs(made) == "full"


@pytest.mark.parametrize("variable", ["DEFT_POLICY", "DEFT_FALLBACK_BACKEND"])
def test_a_wrong_setting_of_a_command_line_is_the_last_line(variable, arguments, monkeypatch):
    """No traceback stands around the message."""
    monkeypatch.setenv(variable, "fastree")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--attention-backend", "deft"])
    with pytest.raises(SystemExit, match=f"deft: {variable} is 'fastree'; expected one of"):
        arguments.resolve(resolve_as_host, make_arguments())


@pytest.mark.parametrize("wrong", ["deft", "fastest"])
def test_a_fallback_is_one_of_the_hosts(wrong, arguments, monkeypatch):
    monkeypatch.setenv("DEFT_FALLBACK_BACKEND", wrong)
    with pytest.raises(SettingsError, match=f"DEFT_FALLBACK_BACKEND is '{wrong}'; .*triton"):
        arguments.resolve(resolve_as_host, make_arguments())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "xpu"}, "device xpu"),
        ({"speculative_algorithm": "DFLASH"}, "speculation by DFLASH"),
        *(({name: True}, f"{words} is not supported") for name, words in _FEATURES),
        ({**DETERMINISTIC, "enable_mixed_chunk": True}, "steps that also prefill"),
        ({**DETERMINISTIC, **MLA}, "deterministic inference of MLA models"),
        *(({name: 2}, "context parallelism") for name in ("dcp_size", "attn_cp_size")),
        ({"kv_cache_dtype": "nvfp4"}, "a KV cache of kind nvfp4 is not supported"),
        (MLA, "no record shows MLA models with tree attention on cpu and SGLang"),
        (
            {**MLA, **EAGLE, "speculative_num_draft_tokens": 2},
            "no record shows MLA models that draft with tree attention on cpu",
        ),
        ({**MLA, "device": "cuda"}, "MLA through torch_native is not supported (fa3 is)"),
        ({**MLA, "kv_cache_dtype": "fp8_e4m3"}, "MLA over a KV cache of kind fp8_e4m3"),
        (
            {**MLA, **EAGLE, "speculative_num_draft_tokens": 8},
            "64 query vectors a request (8 heads, 8 query tokens)",
        ),
        (
            {**MLA, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 2},
            "MLA with token trees",
        ),
        ({**MLA, "attn_dp_size": 2}, "DP attention keeps all heads on each rank"),
        ({**MLA, "tp_size": 1}, "sharing would gain nothing"),
        ({**MLA, "model": latent_model(index_topk=2048)}, "sparse MLA"),
        ({"model": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"model": SimpleNamespace()}, "is not supported"),
        ({"speculative_algorithm": "EAGLE", "speculative_adaptive": True}, "varying length"),
        (  # the host can verify with its backend for prefill
            {**SPLIT, **EAGLE, "speculative_attention_mode": "prefill"},
            "--speculative-attention-mode decode",
        ),
    ],
)
def test_servers_that_are_not_supported_run_on_the_hosts_own(arguments, caplog, changes, reason):
    made = make_arguments(**changes)
    assert served(arguments, made) is None
    assert made.attention_backend == "torch_native"
    assert decode_graphs(made) == "full"
    (record,) = caplog.records
    assert reason in record.message
    assert "torch_native" in record.message


def test_the_page_of_the_host_names_every_argument_that_is_refused(arguments):
    page = (Path(__file__).parents[3] / "docs" / "hosts-sglang.md").read_text(encoding="utf-8")
    table = page.partition("\n## Refused, and why\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 and row[2].strip() and row[3].strip() for row in rows)
    stated = {name for row in rows for name in re.findall("`(.*?)`", row[1])}
    refused = {name for name, _ in _FEATURES}
    assert refused <= stated
    source = inspect.getsource(arguments) + inspect.getsource(layers)
    stated.remove("SGLANG_USE_HND_KVCACHE")  # seen in the pool: `use_hnd`
    assert not {name for name in stated if name not in source}


@pytest.mark.parametrize(
    ("role", "cached", "served_by", "said"),
    [
        ("prefill", False, None, "deft: a prefill server decodes nothing; the host's own backend"),
        ("decode", True, "torch_native", ""),
        ("decode", False, "torch_native", "Give --disaggregation-decode-enable-radix-cache"),
    ],
)
def test_servers_of_one_role(arguments, caplog, role, cached, served_by, said):
    """A prefill server warns of nothing; a decode server is told what lets its requests share."""
    caplog.set_level("INFO", logger="deft_backend")
    roles = {"disaggregation_mode": role, "disaggregation_decode_enable_radix_cache": cached}
    assert served(arguments, make_arguments(**roles)) == served_by
    assert said in caplog.text
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (role == "decode" and not cached)


@pytest.mark.parametrize("policy", ["", "auto", "invariant", "deft-node"])
def test_deterministic_inference_takes_no_other_policy(arguments, caplog, monkeypatch, policy):
    monkeypatch.setenv("DEFT_POLICY", policy)
    served_by = served(arguments, make_arguments(**DETERMINISTIC))
    assert served_by == (None if policy == "deft-node" else "torch_native")
    if policy == "deft-node":
        (record,) = caplog.records
        assert "takes policy invariant, and DEFT_POLICY is deft-node: unset it" in record.message


@pytest.mark.parametrize(
    "changes",
    [
        MLA,
        *(
            {"speculative_algorithm": name, "speculative_attention_mode": "prefill"}
            for name in ("EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
        ),
        {**EAGLE, "speculative_eagle_topk": 1, "device": "cuda"},
        {**EAGLE, "speculative_eagle_topk": 4, "device": "cuda"},
        {**SPLIT, **EAGLE, "speculative_attention_mode": "decode"},
    ],
)
def test_servers_that_are_served(arguments, changes, monkeypatch):
    monkeypatch.setenv("DEFT_MLA", "1")
    assert served(arguments, make_arguments(**changes)) == "torch_native"


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24rc1"])
def test_a_version_that_was_not_tested_runs_on_the_hosts_own(
    arguments, caplog, monkeypatch, version
):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    made = make_arguments(**DETERMINISTIC)
    assert arguments.resolve(resolve_as_host, made) == {}
    assert not hasattr(made, arguments.HOST_DECODE)
    assert made.attention_backend == "torch_native"
    (record,) = caplog.records
    assert f"tested with SGLang >=0.5.17, <0.5.24 and this is {version}" in record.message
    monkeypatch.setenv("DEFT_UNTESTED_HOST", "1")
    assert served(arguments, make_arguments()) == "torch_native"


def test_a_host_that_lacks_a_member_is_left_alone(arguments, caplog, monkeypatch):
    monkeypatch.setattr(versions, "missing", lambda: "a module: a name")
    assert served(arguments, make_arguments()) is None
    assert "this SGLang lacks a member that tree attention uses (a module: a name)" in caplog.text


def test_registering_never_raises(host, monkeypatch, caplog):
    from deft_backend.hosts.sglang import plugin

    monkeypatch.setattr(plugin, "_register", raising(RuntimeError("a host from another planet")))
    plugin.register()
    assert "a host from another planet" in caplog.text


def test_backends_are_surrounded_once_and_later_plugins_have_the_hosts(
    arguments, monkeypatch, caplog
):
    from sglang.srt.layers.attention import attention_registry as registry

    from deft_backend.hosts.sglang import factory, plugin

    wrapped = []
    monkeypatch.setattr(
        factory, "wrap_backend", lambda runner, name, host: wrapped.append(name) or ("tree", host)
    )
    monkeypatch.setitem(registry.ATTENTION_BACKENDS, "theirs", lambda runner: "their backend")
    monkeypatch.setenv("DEFT_FALLBACK_BACKEND", "theirs")
    assert served(arguments, make_arguments()) is None
    assert "one of a plugin that SGLang loads after deft" in caplog.text
    for _ in range(2):
        plugin.surround_backends()
    made = make_arguments()
    assert served(arguments, made) == "theirs"
    create = registry.ATTENTION_BACKENDS["theirs"]
    assert create(SimpleNamespace(server_args=made)) == ("tree", "their backend")
    assert wrapped == ["theirs"]
    assert create(SimpleNamespace(server_args=SimpleNamespace())) == "their backend"
    monkeypatch.setitem(sys.modules, factory.__name__, None)
    assert create(SimpleNamespace(server_args=made)) == "their backend"
    assert "tree attention could not be loaded (ModuleNotFoundError" in caplog.text

"""The class that vLLM gets for the plugin's names: ours, its own, or an error."""

import copy
import logging
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig

import vllm_cpu_backend
from deft_backend.hosts.common.contract import matches, version_key
from deft_backend.hosts.vllm import plugin, registered, versions
from deft_backend.hosts.vllm.backend import cannot_surround, tree_backend
from failure_lines import raising
from vllm_cpu_backend import PlainCpuBackend, original_backend
from vllm_fakes import forget_collectors

CONFIG = AttentionSelectorConfig(128, torch.bfloat16, "auto", None)
CUSTOM = AttentionBackendEnum.CUSTOM


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """The original registry, and no choice from the previous test."""
    monkeypatch.setattr(registered.Custom, "_chosen", None)
    monkeypatch.delenv("DEFT_UNTESTED_HOST", raising=False)
    yield
    forget_collectors()
    for member in AttentionBackendEnum:
        member.clear_override()


def chosen_as_the_host_does(config=CONFIG):
    """The calls of ``platforms/cuda.py`` for a selected backend."""
    backend = CUSTOM.get_class()
    reasons = backend.validate_configuration(device_capability=None, **config._asdict())
    if reasons:
        raise ValueError(reasons)
    return resolve_obj_by_qualname(".".join(backend.full_cls_name()))


def host_chooses(monkeypatch, name):
    """Let the platform return a backend, and record its arguments."""
    asked = []

    def choose(cls, selected, config, num_heads=None):
        asked.append((selected, config))
        return AttentionBackendEnum[name if selected is None else selected.name].get_path()

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(choose))
    return asked


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"])
def test_custom_surrounds_what_the_host_would_choose(name, monkeypatch):
    plugin.register()
    asked = host_chooses(monkeypatch, name)
    host = original_backend(name)
    found = chosen_as_the_host_does()
    assert asked == [(None, CONFIG)]
    assert issubclass(found, host)
    assert found is tree_backend(host)
    assert issubclass(found.get_impl_cls(), host.get_impl_cls())
    assert issubclass(found.get_builder_cls(), host.get_builder_cls())
    # The host's own backend answers the host's questions.
    for question in (
        *["get_name", "get_supported_kernel_block_sizes", "get_supported_head_sizes"],
        *["supports_sink", "is_mla", "get_required_kv_cache_layout"],
        *["supported_kv_cache_layouts", "customize_spec"],
    ):
        ours, theirs = (getattr(each, question, None) for each in (found, host))
        assert getattr(ours, "__func__", ours) is getattr(theirs, "__func__", theirs)
    assert found.forward_includes_kv_cache_update is host.forward_includes_kv_cache_update
    assert found.full_cls_name() != host.full_cls_name()  # it keeps groups apart


def test_classes_before_any_layer_is_configured():
    """Also what a process without plugins reads under our name, and versions without new names."""
    custom = registered.Custom
    assert custom.full_cls_name() == (registered.__name__, "Custom")
    assert custom.get_name() == "CUSTOM"
    with pytest.raises(RuntimeError, match="before it configured any layer"):
        custom.get_builder_cls()
    with pytest.raises(AttributeError, match="registered' has no attribute 'Soup'"):
        _ = registered.Soup


@pytest.mark.parametrize("name", ["CUSTOM", "DEFT"])
def test_our_names_are_registered_once(name, monkeypatch, caplog):
    """To 0.31 vLLM's placeholder alone; a spawned process registers when it reads our name. vLLM
    says nothing about a new name, which also servers have that do not ask for it.
    """
    calls = []

    class Names(dict):
        __members__ = property(lambda self: self)

    log = logging.getLogger("vllm.v1.attention.backends.registry")

    def registering(backend, path):
        calls.append((backend, path))
        log.warning("Registered %s", backend)
        if backend == "DEFT":
            names["DEFT"] = SimpleNamespace()

    names = Names(CUSTOM="placeholder")
    if name == "DEFT":
        names.register = None
    fake = SimpleNamespace(AttentionBackendEnum=names, register_backend=registering)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", fake)
    versions.register("a path")
    first = [("placeholder", "a path"), *([("DEFT", "a path")] if name == "DEFT" else [])]
    assert calls == first
    assert caplog.messages == ["Registered placeholder"]
    assert not log.disabled
    if name == "CUSTOM":
        return
    ours, again = names["DEFT"], ("a path",)
    assert ours.__reduce_ex__(4) == (versions._registered, again)
    versions.register("another")
    assert calls[2:] == [("placeholder", "another"), (ours, "another")]
    calls.clear()
    assert versions._registered("a path") is ours
    assert calls == []
    del names["DEFT"]
    assert versions._registered("a path") is names["DEFT"]
    assert calls == first


def test_layers_may_get_different_backends(monkeypatch):
    plugin.register()
    found = []
    for name, head_size in (("FLASH_ATTN", 128), ("TRITON_ATTN", 80)):
        host_chooses(monkeypatch, name)
        found.append(chosen_as_the_host_does(CONFIG._replace(head_size=head_size)))
    assert found[0] is not found[1]
    assert resolve_obj_by_qualname(".".join(found[0].full_cls_name())) is found[0]


class HeadsOfTwoSizes:
    """A Gemma 4 of two layers, in the form of versions from 0.32 on."""

    total_num_hidden_layers = 2

    def __getitem__(self, layer):
        return SimpleNamespace(head_size=(256, 512)[layer])


@pytest.mark.parametrize("new_version", [True, False])
@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma4ForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        "EmbeddingGemma2Model",
        "LlamaForCausalLM",
    ],
)
def test_a_model_keeps_the_hosts_defaults_for_it(architecture, new_version, monkeypatch):
    """The host sets some defaults only if the user names no backend; ours counts as none."""
    monkeypatch.setattr(
        "vllm.v1.attention.backends.fa_utils.is_fa_version_supported", lambda version: new_version
    )

    def start(backend):
        attention = SimpleNamespace(
            backend=backend, flash_attn_version=None, use_non_causal=False, backend_per_kind=None
        )
        model = SimpleNamespace(
            architecture=architecture,
            hf_text_config=SimpleNamespace(
                head_dim=256, global_head_dim=512, layer_types=["sliding", "full"]
            ),
            model_arch_config=HeadsOfTwoSizes(),
            override_generation_config={},
            is_mm_prefix_lm=False,
            max_model_len=2048,
        )
        config = SimpleNamespace(
            model_config=model,
            attention_config=attention,
            diffusion_config=object(),
            scheduler_config=None,
        )
        if settings := MODELS_CONFIG_MAP.get(architecture):
            settings.verify_and_update_config(config)
        return config

    plugin.register()
    asked = host_chooses(monkeypatch, "FLASH_ATTN")
    expected, config = start(None).attention_config, start(CUSTOM)
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    for _ in range(2):
        found = chosen_as_the_host_does()
        name = expected.backend.name if expected.backend else "FLASH_ATTN"
        assert issubclass(found, original_backend(name))
        selected, given = asked.pop()
        assert selected == expected.backend
        assert given.use_non_causal == expected.use_non_causal
    expected.backend = CUSTOM
    assert config.attention_config == expected


class OtherLayout(AttentionBackend):
    """A backend with separate keys and values, in the form of older and of newer versions."""

    get_name = staticmethod(lambda: "OTHER")
    get_impl_cls = get_builder_cls = staticmethod(lambda: None)
    get_kv_cache_shape = staticmethod(lambda b, n, h, d, cache_dtype_str="auto": (2, b, n, h, d))
    customize_spec = classmethod(
        lambda cls, spec: replace(spec, num_head_slots=2 * spec.num_kv_heads)
    )


def other(**answers):
    """A backend that answers like this, which the registry finds here."""
    members = {name: classmethod(lambda cls, said=said: said) for name, said in answers.items()}
    return type("Other", (PlainCpuBackend,), members)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (OtherLayout, "laid out"),
        (other(forward_includes_kv_cache_update=True), "writes the KV cache"),
        (other(is_mla=True), "MLA"),
        (other(is_sparse=True), "of another kind (sparse or state space)"),
        (other(is_ssm=True), "of another kind (sparse or state space)"),
    ],
)
def test_what_cannot_be_surrounded_runs_by_itself(host, reason, monkeypatch, caplog):
    plugin.register()
    assert reason in cannot_surround(host)
    monkeypatch.setattr(sys.modules[__name__], "Other", host, raising=False)
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.Other")
    host_chooses(monkeypatch, "FLASH_ATTN")
    assert CUSTOM.get_class().validate_configuration(None, **CONFIG._asdict()) == []
    assert CUSTOM.get_class()._chosen is host
    assert reason in caplog.text


def test_a_fallback_may_be_named(monkeypatch):
    plugin.register()
    asked = host_chooses(monkeypatch, "FLASH_ATTN")
    monkeypatch.setenv("DEFT_FALLBACK_BACKEND", "TRITON_ATTN")
    assert issubclass(chosen_as_the_host_does(), original_backend("TRITON_ATTN"))
    assert asked[0][0] is AttentionBackendEnum.TRITON_ATTN
    for name in ("CUSTOM", "DEFT", "fa3"):
        monkeypatch.setenv("DEFT_FALLBACK_BACKEND", name)
        with pytest.raises(ValueError, match=f"'{name}'; expected one of .*FLASH_ATTN"):
            chosen_as_the_host_does()


def test_a_configuration_that_no_backend_takes(monkeypatch):
    plugin.register()
    fails = raising(ValueError("no backend takes it"))
    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", fails)
    reasons = CUSTOM.get_class().validate_configuration(None, **CONFIG._asdict())
    assert reasons == ["no backend takes it"]


@pytest.mark.parametrize("installed_ahead", [False, True])
def test_a_server_on_the_cpu_is_the_hosts(installed_ahead, monkeypatch, caplog):
    monkeypatch.setattr("sys.argv", ["api_server.py", "--attention-backend", "DEFT"])
    if installed_ahead:
        vllm_cpu_backend.install()
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden() is installed_ahead
    assert ("vLLM's CPU platform has one backend" in caplog.text) is not installed_ahead


def test_every_name_is_the_plugin():
    plugin.register()
    plugin.register()  # like a process that vLLM forks
    # Outside of a server the host is untouched.
    assert AttentionBackendEnum.CPU_ATTN.get_class() is cpu_attn.CPUAttentionBackend
    names = [
        name
        for name, member in AttentionBackendEnum.__members__.items()
        if versions.is_ours(member)
    ]
    assert names == (["CUSTOM", "DEFT"] if versions.backend_name() == "DEFT" else ["CUSTOM"])
    for name in names:
        assert AttentionBackendEnum[name].get_class() is registered.Custom
    assert not versions.is_ours(None)
    assert not versions.is_ours(AttentionBackendEnum.FLASH_ATTN)


def test_a_spawned_process_reads_our_name_before_it_loads_plugins():
    """vLLM passes its configuration to spawned processes; pickle passes an enum by value."""
    plugin.register()
    backend = AttentionBackendEnum[versions.backend_name()]
    assert copy.deepcopy(backend) is backend
    assert pickle.loads(pickle.dumps(backend)) is backend
    script = (
        "import pickle, sys; backend = pickle.loads(sys.stdin.buffer.read()); "
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum; "
        "assert backend is AttentionBackendEnum[backend.name]; print(backend.name)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(backend),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.decode().split() == [backend.name]


def left_alone(reason, monkeypatch, caplog):
    """A server that asks for the plugin runs the host's own choice and says why."""
    host_chooses(monkeypatch, "FLASH_ATTN")
    plugin.register()
    assert not caplog.text
    assert chosen_as_the_host_does() is original_backend("FLASH_ATTN")
    assert "FLASH_ATTN decodes without tree attention: " in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0rc1"])
def test_a_version_that_was_not_tested_is_left_alone(version, monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    reason = f"tested with vLLM {versions.VLLM} and this is {version}"
    left_alone(reason, monkeypatch, caplog)
    # The CPU's only backend, for every request. Servers that do not ask hear nothing.
    caplog.clear()
    monkeypatch.setattr("sys.argv", ["server", "--attention-backend", "CUSTOM"])
    plugin.register()
    assert reason in caplog.text
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    monkeypatch.setattr("sys.argv", ["server"])
    monkeypatch.setenv("DEFT_UNTESTED_HOST", "1")
    monkeypatch.setattr(versions, "missing", lambda: None)  # of the really installed version
    plugin.register()
    assert chosen_as_the_host_does() is tree_backend(original_backend("FLASH_ATTN"))


def test_a_host_that_lacks_a_member_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(versions, "missing", lambda: "a module: a name")
    left_alone(
        "this vLLM lacks a member that tree attention uses (a module: a name)", monkeypatch, caplog
    )


def test_wrong_settings_stop_the_servers_first_process(monkeypatch):
    """The API server loads plugins before anything else, so the message comes early and last.

    A server without tree attention does not read its settings.
    """
    monkeypatch.setenv("DEFT_POLICY", "fastest")
    monkeypatch.setattr("sys.argv", ["api_server.py", "--model", "tiny"])
    plugin.register()
    monkeypatch.setattr("sys.argv", ["api_server.py", "--attention-backend", "DEFT"])
    with pytest.raises(SystemExit, match="deft: DEFT_POLICY is"):
        plugin.register()


def test_every_member_is_expected_in_some_version_of_the_window():
    window = versions.VLLM
    lowest, beyond = version_key(window.lowest), version_key(window.beyond)
    tried = [f"0.{minor}.0" for minor in range(lowest[1], beyond[1])]
    assert all(window.holds(version) for version in tried)
    for member in versions.CONTRACT:
        assert any(matches(version, member.versions) for version in tried), member


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.26.0", "CUSTOM"), ("0.31.1", "CUSTOM"), ("0.32.0", "DEFT"), ("0.33.0+cu130", "DEFT")],
)
def test_a_server_is_started_with_our_own_name(version, name):
    assert versions.backend_name(version) == name

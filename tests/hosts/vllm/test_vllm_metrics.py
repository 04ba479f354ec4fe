"""The server's counters on vLLM's ``/metrics``: of one API server, and of several."""

import json
import logging

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.metrics.prometheus import get_prometheus_registry

from deft_backend.hosts.vllm import plugin
from deft_backend.hosts.vllm.report import server
from deft_backend.hosts.vllm.step.backend import tree_backend
from deft_backend.hosts.vllm.step.cpu import PlainCpuBackend
from deft_backend.telemetry import metrics
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.state import StateWriter
from vllm_fakes import Batch, Layers, cached, forget_collectors, make_config, make_spec, run


@pytest.fixture(autouse=True)
def untouched(monkeypatch, tmp_path):
    """A server on port 8123 with its own state folder; nothing is registered before or after."""
    monkeypatch.setenv("DEFT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv(metrics.MULTIPROCESS, raising=False)
    monkeypatch.setattr("sys.argv", ["api_server.py", "--model", "tiny", "--port", "8123"])
    forget_collectors()
    yield
    forget_collectors()
    for member in AttentionBackendEnum:
        member.clear_override()


@pytest.fixture
def writers(monkeypatch):
    """Writers that the server would start; the tests call their looks themselves."""
    started = []
    monkeypatch.setattr(StateWriter, "start", lambda writer: started.append(writer))
    return started


def decode(steps):
    """A server of this process decodes `steps` steps of three requests."""
    layers = Layers(tree_backend(PlainCpuBackend), make_config(), count=1)
    builder = layers.builder(make_spec())
    batch, cache = cached(Batch([40, 37, 33], shared=2))
    for _ in range(steps):
        run(layers.impls[0], batch, cache, builder.build(0, batch.common()))


def page(registry=REGISTRY):
    """Our samples, by name and labels."""
    return {
        f"{sample.name} {sorted(sample.labels.items())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("deft_")
    }


def of(name, **labels):
    return f"deft_{name}_total {sorted({**labels, 'tp_rank': '0'}.items())}"


def test_one_api_server_reads_the_state_files_of_its_port(writers, tmp_path):
    plugin.register()
    assert get_prometheus_registry() is REGISTRY  # the page is made from it
    assert page() == {}
    decode(steps=3)
    (writer,) = writers
    assert [type(listener) for listener in writer.listeners] == [DecodeLog]
    writer.look()
    assert writer.path == tmp_path / "state" / "8123-tp0.json"
    state = json.loads(writer.path.read_text())
    assert page() == {
        of("decode_steps", kernel="tree"): 3,
        of("decode_steps", kernel="host"): 0,
        of("kv_read_bytes"): state["kv_bytes_read"],
        of("kv_query_guided_bytes"): state["kv_bytes_query_guided"],
        of("plans"): 3,
        of("plan_seconds"): state["plan_seconds"],
        of("verified_tokens"): 0,
        of("verified_drafts"): 0,
        of("accepted_tokens"): 0,
        of("compile_seconds"): state["compile_seconds"],
        of("short_extends"): 0,
    }
    assert state["kv_bytes_query_guided"] == 3 * 110 * 2 * 2 * 64 * 4


def test_a_server_on_another_port_is_not_shown(writers, monkeypatch):
    plugin.register()
    monkeypatch.setattr("sys.argv", ["api_server.py", "--port", "8124"])
    decode(steps=1)
    writers[0].look()
    assert page() == {}


def test_several_api_servers_show_what_the_decoding_process_publishes(
    writers, monkeypatch, tmp_path
):
    """vLLM names the folder before it starts its processes; all of them then write into it."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    monkeypatch.setenv(metrics.MULTIPROCESS, str(folder))
    metrics._value_class.cache_clear()
    metrics._value.cache_clear()
    plugin.register()
    decode(steps=2)
    (writer,) = writers
    assert [type(each) for each in writer.listeners] == [metrics.Publisher, DecodeLog]
    writer.look()
    assert page() == {}  # otherwise every process would show them again
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    shown = page(registry)
    assert shown[of("decode_steps", kernel="tree")] == 2
    assert shown[of("kv_read_bytes")] == writer.state.kv_bytes_read > 0
    metrics._value_class.cache_clear()
    metrics._value.cache_clear()


@pytest.mark.parametrize("what", ["register", "publish"])
def test_counters_that_cannot_be_shown_cost_a_line(what, writers, monkeypatch, tmp_path, caplog):
    if what == "publish":
        metrics._value_class.cache_clear()
        metrics._value.cache_clear()
        monkeypatch.setenv(metrics.MULTIPROCESS, str(tmp_path / "missing"))
    else:
        plugin.register()  # a second registration is refused by the registry
    with caplog.at_level(logging.WARNING, "deft_backend"):
        plugin.register()
        decode(steps=1)
    assert caplog.text.count("/metrics does not show tree attention") == len(caplog.records) == 1
    assert AttentionBackendEnum.CUSTOM.is_overridden()
    assert server._current is not None
    assert server._current.state is not None
    assert server._current.state.steps_tree == 1


def test_a_wrong_setting_is_another_servers_affair(monkeypatch, caplog):
    """A server without tree attention does not read its settings."""
    monkeypatch.setenv("DEFT_POLICY", "fastest")
    with caplog.at_level(logging.WARNING, "deft_backend"):
        plugin.register()
    assert not caplog.records
    assert AttentionBackendEnum.CUSTOM.is_overridden()
    assert page() == {}


def test_wrong_settings_stop_the_servers_first_process(monkeypatch):
    """The API server loads plugins before anything else, so the message comes early and last."""
    arguments = ["api_server.py", "--attention-backend", "DEFT"]
    monkeypatch.setattr("sys.argv", arguments)
    plugin.register()
    monkeypatch.setenv("DEFT_POLICY", "fastest")
    with pytest.raises(SystemExit, match="deft: DEFT_POLICY is"):
        plugin.register()

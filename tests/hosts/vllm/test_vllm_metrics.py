"""The server's counters on vLLM's ``/metrics``: of one API server, and of several."""

import json
import logging
from itertools import product

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.metrics.prometheus import get_prometheus_registry

from deft_backend.hosts.vllm import plugin
from deft_backend.telemetry import metrics
from deft_backend.telemetry.decode_log import DecodeLog
from deft_backend.telemetry.state import StateWriter
from state_files import state_path
from vllm_fakes import Batch, Step, forget_collectors, state, tree_layers


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """A server on port 8123 with its own state folder; nothing is registered before or after."""
    monkeypatch.delenv(metrics.MULTIPROCESS, raising=False)
    monkeypatch.setattr("sys.argv", ["api_server.py", "--model", "tiny", "--port", "8123"])
    forget_collectors()
    metrics._value_class.cache_clear()
    metrics._value.cache_clear()
    yield
    metrics._value_class.cache_clear()
    metrics._value.cache_clear()
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
    step = Step(Batch([40, 37, 33], shared=2), tree_layers(count=1))
    for at in range(steps):
        if at:
            step.build()
        step.run()


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
    assert writer.path == state_path(tmp_path / "servers", 8123)
    written = json.loads(writer.path.read_text())
    kinds = product(("decode", "mixed", "verification"), ("tree", "host"))
    bytes_of_contexts = written["kv_bytes_query_guided"]
    counted = {("decode", "tree"): {"steps": 3, "rows": 9, "context_bytes": bytes_of_contexts}}
    assert page() == {
        **{
            of(f"decode_{name}", kind=kind, kernel=kernel): number
            for kind, kernel in kinds
            for name, number in counted.get(
                (kind, kernel), dict.fromkeys(("steps", "rows", "context_bytes"), 0)
            ).items()
        },
        of("kv_read_bytes"): written["kv_bytes_read"],
        of("kv_query_guided_bytes"): written["kv_bytes_query_guided"],
        of("plans"): 3,
        of("plan_seconds"): written["plan_seconds"],
        of("verified_tokens"): 0,
        of("verified_drafts"): 0,
        of("accepted_tokens"): 0,
        of("compile_seconds"): written["compile_seconds"],
    }
    assert written["kv_bytes_query_guided"] == 3 * 110 * 2 * 2 * 64 * 4


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
    plugin.register()
    decode(steps=2)
    (writer,) = writers
    assert [type(each) for each in writer.listeners] == [metrics.Publisher, DecodeLog]
    writer.look()
    assert page() == {}  # otherwise every process would show them again
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    shown = page(registry)
    assert shown[of("decode_steps", kind="decode", kernel="tree")] == 2
    assert shown[of("kv_read_bytes")] == writer.state.counters().kv_bytes_read > 0


@pytest.mark.parametrize("what", ["register", "publish"])
def test_counters_that_cannot_be_shown_cost_a_line(what, writers, monkeypatch, tmp_path, caplog):
    if what == "publish":
        monkeypatch.setenv(metrics.MULTIPROCESS, str(tmp_path / "missing"))
    else:
        plugin.register()  # a second registration is refused by the registry
    with caplog.at_level(logging.WARNING, "deft_backend"):
        plugin.register()
        decode(steps=1)
    assert caplog.text.count("/metrics does not show tree attention") == len(caplog.records) == 1
    assert AttentionBackendEnum.CUSTOM.is_overridden()
    assert state().counters().steps_tree == 1


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
    monkeypatch.setattr("sys.argv", ["api_server.py", "--attention-backend", "DEFT"])
    plugin.register()
    monkeypatch.setenv("DEFT_POLICY", "fastest")
    with pytest.raises(SystemExit, match="deft: DEFT_POLICY is"):
        plugin.register()

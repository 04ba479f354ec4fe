"""The layers, caches and servers of vLLM that get tree attention, alone and among others."""

import logging
import threading
from ast import literal_eval
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.limits import LayerShape
from deft_backend.hosts.common.warm_up import Drafts, LayerKind
from deft_backend.hosts.vllm import factory, plugin, server, versions
from deft_backend.hosts.vllm.backend import tree_backend
from deft_backend.hosts.vllm.factory import LayerGroup, build, unsupported_server, unsupported_spec
from deft_backend.hosts.vllm.layers import LINEAR, Layer, divide_layers, layer_of, unsupported_kind
from deft_backend.hosts.vllm.plugin import asks_for_us, port_of
from deft_backend.hosts.vllm.step import step_of
from deft_backend.settings.config import Settings
from deft_backend.telemetry.state import ServerState
from drawings import check_asked
from failure_lines import raising
from vllm_cpu_backend import PlainCpuBackend, original_backend
from vllm_fakes import (
    DIM,
    HEADS,
    KV_HEADS,
    Batch,
    LatentImplementation,
    Layers,
    cached,
    close,
    make_config,
    make_spec,
    reference,
    run,
    speculating,
    state,
    told,
    tree_layers,
)

COMMON = {"block_size": 16, "head_size": DIM, "dtype": torch.float32, "num_kv_heads": KV_HEADS}
WINDOWED = SlidingWindowSpec(sliding_window=9, **COMMON)
CHUNKED = ChunkedLocalAttentionSpec(attention_chunk_size=8, **COMMON)
STATE = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))


def passing_on(*args, **kwargs):
    """An implementation made of two others."""


def test_the_base_class_names_arguments_that_are_passed_on():
    plain = (8, 64, 0.1, 2, None, None, "fp8", 30.0, "decoder", None)
    layer = layer_of(passing_on, plain, {})
    assert layer == Layer(LayerShape(8, 2, 64), 0.1, 30.0, None, cache="fp8")
    assert layer_of(passing_on, plain, {"sinks": torch.zeros(8)}).sinks
    window = (*plain[:5], 4, *plain[6:])
    assert layer_of(passing_on, window, {}).reason == "a sliding window"
    assert layer_of(passing_on, (*plain, 1), {}).reason == "the argument 10"


def test_what_a_layer_must_not_have():
    read = partial(layer_of, partial(LatentImplementation.__init__, None), ())

    def answer(*words):
        given = {"num_heads": 8, "head_size": 64, "scale": 0.1, "num_kv_heads": 2}
        for name, _, value in (word.partition("=") for word in words):
            given[name] = literal_eval(value)
        layer = read(given)
        yield f"{tuple(layer.shape)} of {layer.cache}, cap {layer.logit_cap}: {layer.reason}"
        given["attn_type"] = SimpleNamespace(value=given.get("attn_type", "decoder"))
        assert read(given) == layer  # vLLM has an enumeration of these

    check_asked(Path(__file__).with_name("layers.txt"), answer)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN"])
def test_a_plain_layer_of_the_hosts_own_is_taken(name):
    """With the real signatures and defaults of the host's implementations."""
    assert name == "CPU_ATTN" or versions.has_standard_cache(original_backend(name))
    impl = original_backend(name).get_impl_cls()
    init = impl.__init__.__get__(object.__new__(impl))
    plain = (8, 128, 0.1, 2, None, None, "auto", None, "decoder", None)
    assert layer_of(init, plain, {}) == Layer(LayerShape(8, 2, 128), 0.1, 0.0, None)


@pytest.mark.parametrize("several", ["_q_scale", "_k_scale", "_v_scale"])
def test_scales_for_each_head_are_the_hosts(several):
    layer = Layer(LayerShape(8, 2, 64), 0.1, 0.0, None, cache="fp8")
    module = SimpleNamespace(
        _q_scale=torch.ones(1), _k_scale=torch.ones(()), _v_scale=torch.ones(1)
    )
    held = layer.with_scales_of(module)
    assert held.reason is None
    assert held.with_scales_of(module) is held
    setattr(module, several, torch.full((1,), 2.0))  # as after new weights
    assert sum(map(float, held.with_scales_of(module).scales)) == 4.0
    setattr(module, several, torch.ones(2))
    assert layer.with_scales_of(module).reason == "scales for each head"
    assert layer._replace(reason="sinks").with_scales_of(module).reason == "sinks"


def test_servers_of_other_kinds_are_refused(monkeypatch):
    """The file's words are fields of the configuration. Words in capitals are settings."""

    def answer(*words):
        changes = {}
        with monkeypatch.context() as environment:
            for name, _, value in (word.partition("=") for word in words):
                if name.isupper():
                    environment.setenv(name, value)
                elif name == "drafts":
                    kind = {"enable_adaptive_verification": value == "adaptive"}
                    changes["speculative_config"] = speculating(4, **kind)
                else:
                    changes[name] = int(value)
            yield str(unsupported_server(make_config(**changes)))

    check_asked(Path(__file__).with_name("servers.txt"), answer)


def test_a_cache_of_an_unknown_kind_is_refused():
    """Newer versions add fields that describe a packed cache by values other than the default."""
    assert unsupported_spec(make_spec(page_size_padded=1 << 20)) is None
    # Layers of a group differ: each layer's own specification decides.
    assert unsupported_spec(make_spec(sliding_window=64)) is None
    assert "SlidingWindowSpec" in unsupported_spec(WINDOWED)
    assert "MLAAttentionSpec" in unsupported_spec(MLAAttentionSpec(**{**COMMON, "num_kv_heads": 1}))

    @dataclass(frozen=True)
    class Packed:
        block_size: int
        slots: int | None = None

    assert versions.unknown_cache(Packed(16)) is None
    assert versions.unknown_cache(Packed(16, slots=4)) == "slots=4"
    assert unsupported_spec(make_spec(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)) is None
    for mode in KVQuantMode:
        if mode.name.endswith("PER_TOKEN_HEAD"):
            assert "kv_quant_mode" in unsupported_spec(make_spec(kv_quant_mode=mode))
    for name in ("num_head_slots", "state_content_bytes", "tokens_per_state"):
        if name in {field.name for field in fields(make_spec())}:
            assert name in unsupported_spec(make_spec(**{name: 4}))


def test_backends_that_state_their_caches_shape(monkeypatch):
    """As in vLLM to 0.28: only one order of heads and tokens, with K and V side by side."""
    monkeypatch.setattr(versions, "_backends_state_shapes", lambda: True)
    for shape, standard in (
        (lambda blocks, tokens, heads, dim: (blocks, heads, tokens, 2 * dim), True),
        (lambda blocks, tokens, heads, dim: (blocks, tokens, heads, 2 * dim), False),
        (lambda blocks, tokens, heads, dim: (2, blocks, tokens, heads, dim), False),
        (raising(ValueError("no such shape")), False),
    ):
        assert versions.has_standard_cache(SimpleNamespace(get_kv_cache_shape=shape)) == standard


ORDERS_CACHES = hasattr(AttentionBackend, "get_kv_cache_shape")  # each backend, to 0.28


@pytest.mark.parametrize(
    ("order", "strides"),
    [  # of a block, head and token in elements: 3 layers, 2 blocks, 2 heads, 16 tokens, 128
        ("LBNHC", (4096, 128, 256)),
        ("LBHNC", (4096, 2048, 128)),
        ("BLNHC", (12288, 128, 256)),
        ("BHLNC", (12288, 6144, 128)),
        (lambda: (0, 1, 2, 3), (4096, 2048, 128)),
        (lambda: (0, 2, 1, 3), (4096, 128, 256)),
        (raising(NotImplementedError), (4096, 2048, 128)),
        (None, (4096, 2048, 128)),
    ],
)
def test_a_warm_up_sees_the_strides_of_the_servers_caches(order, strides, monkeypatch):
    """By the server's layout, or by a backend's own order."""
    host, config = SimpleNamespace(), None
    if isinstance(order, str):
        if ORDERS_CACHES:
            pytest.skip("servers resolve no layout")
        config = make_config(layout=order)
    else:
        monkeypatch.setattr(versions, "_backends_state_shapes", lambda: True)
        host = SimpleNamespace(**{"get_kv_cache_stride_order": order} if order else {})
    shape = (2, 2, 16, 128)
    cache = versions.blank_cache(host, config, shape, 3, torch.float16, torch.device("cpu"))
    assert (cache.shape, cache.stride(), cache.any()) == (shape, (*strides, 1), False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_made_outside_of_memory_pools(device, monkeypatch):
    set_up, threads = [], []
    monkeypatch.setattr(torch.cuda, "set_device", set_up.append)
    make = lambda: threads.append(threading.current_thread().name) or "made"  # noqa: E731
    assert factory.outside_memory_pools(make, torch.device(device)) == "made"
    assert set_up == ([torch.device("cuda")] if device == "cuda" else [])
    assert threads == ["deft-set-up_0"]


@pytest.mark.parametrize(("device", "largest"), [("cpu", 3000), ("cuda", 2048)])
def test_the_device_planner_bounds_a_group(device, largest, monkeypatch, failures):
    """A failed set-up is one line, and the layers are the host's."""
    asked = []

    class Made:
        unsupported = staticmethod(lambda *given, **kind: None)

        def __init__(self, **sizes):
            asked.append(sizes["max_batch"])
            raise RuntimeError("no memory")

    monkeypatch.setattr(factory, "TreeAttention", Made)
    monkeypatch.setenv("DEFT_MAX_BATCH", "3000")
    config = make_config(max_num_seqs=4000)
    names = [f"layer.{at}" for at in range(tree_layers(config).count)]
    given = factory.LayerGroup(PlainCpuBackend, make_spec(), names, config, torch.device(device))
    assert factory.create_group(given) is None
    assert asked == [largest]
    assert failures == [
        "deft: tree attention could not be set up (RuntimeError('no memory')); these layers run "
        "through CPU_ATTN alone"
    ]
    failures.clear()


def test_what_a_server_reports(monkeypatch):
    """The first rank logs; stages and engines have files of their own. vLLM tells a dense model's
    second engine that it is alone, by its index.
    """
    told = {}
    monkeypatch.setattr(server, "DecodeLog", lambda seconds: f"every {seconds} s")
    monkeypatch.setattr(server, "page_of_files", lambda: "a page")
    monkeypatch.setattr(server, "report_counters", lambda *given, **named: told.update(named))

    def answer(seconds, tensor_rank, *words):
        changes = {name: int(value) for name, _, value in (word.partition("=") for word in words)}
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", seconds)
        place, state = (
            make_config(**changes).parallel_config,
            SimpleNamespace(rank=int(tensor_rank)),
        )
        server._start_reporting(state, place, Settings())
        return [str(told)]

    check_asked(Path(__file__).with_name("reports.txt"), answer)


@pytest.mark.parametrize("rank", [None, 3])
def test_how_a_server_describes_itself(rank, monkeypatch):
    asked = raising(AssertionError("outside")) if rank is None else lambda: str(rank)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", asked)
    monkeypatch.setattr("sys.argv", ["server", "--port", "81"])
    config, model = make_config(), {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    model |= {"num_layers": 3, "device": "cpu", "short_tokens": 512, "values_apart": False}
    config.attention_config.backend = SimpleNamespace(name="DEFT")
    monkeypatch.setattr(server, "report_counters", lambda *given, **named: None)
    settings = Settings(policy="fasttree")
    found = server.Server(config).counters_of(settings, torch.bfloat16, **model)
    expected = ServerState(
        **{"port": 81, "rank": rank or 0, "host": "vllm", "backend": "DEFT", "policy": "fasttree"},
        **{"host_version": versions.VLLM.installed(), "dtype": "bfloat16", "dtype_bytes": 2},
        **model,
    )
    assert (found.description(), found.values_apart) == (expected.description(), False)


@pytest.mark.parametrize("speaks", [True, False])
def test_our_lines_are_in_the_hosts_log(speaks, monkeypatch):
    """vLLM configures only its own logger; a process may have set up ours itself."""
    ours, host = logging.Logger("deft"), logging.Logger("vllm", logging.ERROR)
    own, theirs = logging.NullHandler(), [logging.NullHandler(), logging.NullHandler()]
    host.handlers, host.propagate = list(theirs), False
    if not speaks:
        ours.addHandler(own)
    monkeypatch.setattr(plugin, "logger", ours)
    monkeypatch.setattr(plugin, "_register", lambda: None)
    loggers = SimpleNamespace(getLogger=lambda name: {"vllm": host}[name])
    monkeypatch.setattr(plugin, "logging", loggers)
    plugin.register()
    expected = (theirs, logging.ERROR, False) if speaks else ([own], logging.NOTSET, True)
    assert (ours.handlers, ours.level, ours.propagate) == expected
    host.handlers.clear()
    monkeypatch.setattr(plugin, "logger", silent := logging.Logger("deft"))
    plugin.register()
    assert (silent.handlers, silent.level, silent.propagate) == ([], logging.NOTSET, True)


@pytest.mark.parametrize(
    ("longest", "columns", "drafts"),
    [
        (2000, [125, 128], None),
        (2001, [126, 128], Drafts(5, ragged=True)),
        (2048, [128], None),
        (2049, [129, 144], None),
    ],
)
def test_a_server_compiles_for_the_steps_that_it_will_see(longest, columns, drafts, monkeypatch):
    """vLLM may make a page table wider, to a multiple of 16 pages.

    Requests of a verification may have different numbers of tokens.
    """
    warmed_up, made, make = [], [], TreeAttention.__init__

    def recorded(self, **sizes):
        made.append(sizes)
        make(self, **sizes)

    def prepared(attention, tensors, settings):
        assert settings == Settings.from_env()
        warmed_up.append(tensors)

    monkeypatch.setattr(TreeAttention, "__init__", recorded)
    monkeypatch.setattr(factory, "prepare_kernels", prepared)
    monkeypatch.setenv("DEFT_MAX_BATCH", "9" if drafts else "99")
    speculative = None if drafts is None else speculating(4)
    config = make_config(speculative_config=speculative, max_model_len=longest)
    layers = tree_layers(config, arguments={"logits_soft_cap": 30.0})
    group = layers.builder(make_spec()).deft_group
    assert made == [
        {
            **{"num_query_heads": 4, "num_kv_heads": KV_HEADS, "head_dim": DIM, "policy": "auto"},
            **{"dtype": torch.float32, "kv_dtype": None, "device": torch.device("cpu")},
            **{"page_size": 16, "max_batch": 9 if drafts else 16, "max_tokens": columns[-1] * 16},
            "query_tokens": 5 if drafts else 1,
        }
    ]
    (tensors,) = warmed_up
    assert (tensors.table_columns, tensors.drafts) == (columns, drafts)
    assert (tensors.k_cache.shape, tensors.v_cache.shape) == ((2, 16, KV_HEADS, DIM),) * 2
    assert {tensors.table_dtype, tensors.integers} == {torch.int32}
    assert [*tensors.layers] == [LayerKind(soft_cap=True)]
    assert (group.counts, group.tree_layers) == (True, 2)


def test_what_a_command_line_says(tmp_path):
    """The server's port, and whether it asks for the plugin; a file of arguments may say it first.

    The file's text is that behind ``--config``, with ``;`` for the end of a line.
    """
    path = tmp_path / "server.yaml"

    def answer(*words):
        words = list(words)
        path.unlink(missing_ok=True)
        if "--config" in words:
            at = words.index("--config") + 1
            if words[at] != "missing":
                path.write_text(words[at].replace(";", "\n").replace(":", ": "))
            words[at] = str(path)
        return [f"port {port_of(words)}, {'ours' if asks_for_us(words) else 'not ours'}"]

    check_asked(Path(__file__).with_name("command_lines.txt"), answer)


# Models that mix full attention with other layers


def layers_of(config, prefix, spec, count=1, **arguments):
    return tree_layers(config, count=count, arguments=arguments, prefix=prefix, spec=spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (None, None),
        (make_spec(), None),
        (make_spec(head_size_v=DIM), None),
        (WINDOWED, "a sliding window"),
        (make_spec(sliding_window=9), "a sliding window"),
        (CHUNKED, "chunked local attention"),
        (make_spec(attention_chunk_size=8), "chunked local attention"),
        (STATE, LINEAR),
        (make_spec(non_causal=True), "attention that is not causal"),
        (make_spec(head_size_v=32), f"keys of {DIM} and values of 32 elements"),
        (type("PackedSpec", (FullAttentionSpec,), {})(**COMMON), "a KV cache of kind PackedSpec"),
    ],
)
def test_a_layers_own_cache_decides(spec, reason):
    module = SimpleNamespace(get_kv_cache_spec=lambda vllm_config: spec)
    assert unsupported_kind(module, make_config()) == reason


def test_every_group_decides_for_its_layers(caplog):
    """Full attention, sliding windows, chunks and recurrent states: one line at the start."""
    config = make_config()
    windowed = layers_of(config, "windowed", WINDOWED, 2, sliding_window=9)
    chunked = layers_of(config, "chunked", CHUNKED)
    full = layers_of(config, "full", make_spec(), 2)
    config.compilation_config.static_forward_context["mamba"] = SimpleNamespace(
        get_kv_cache_spec=lambda vllm_config: STATE
    )
    caplog.set_level("INFO", "deft_backend")
    builders = [windowed.builder(WINDOWED), chunked.builder(CHUNKED), full.builder(make_spec())]
    assert [line for line in caplog.messages if "layers decode through" in line] == [
        "deft: 2 of 6 layers decode through tree attention; 2 with a sliding window, 1 with "
        f"chunked local attention, 1 with {LINEAR} through the host's kernels"
    ]
    assert "not supported" not in caplog.text
    assert [builder.deft_group is None for builder in builders] == [True, True, False]

    batch = Batch([40, 45, 37, 50], shared=2)
    built = [builder.build(0, batch.common()) for builder in builders]
    assert [step_of(metadata) is None for metadata in built] == [True, True, False]
    assert (state().num_layers, state().counters().steps_tree) == (2, 1)


def test_a_layer_is_the_hosts_in_a_group_of_full_layers(kind, rests, caplog):
    """Without vLLM's hybrid cache manager, all layers have one kind of cache. The host's layers get
    the whole batch."""
    config = kind.config()
    full = layers_of(config, "full", make_spec())
    chunked = layers_of(config, "chunked", make_spec(attention_chunk_size=8))
    window = layers_of(config, "window", make_spec(sliding_window=9), sliding_window=9)
    spec = make_spec(attention_chunk_size=8, sliding_window=9)
    names = ["window.0", "chunked.0", "full.0"]
    caplog.set_level("INFO", "deft_backend")
    builder = full.backend.get_builder_cls()(spec, names, config, torch.device("cpu"))
    assert [line for line in caplog.messages if "layers decode through" in line] == [
        "deft: 1 of 3 layers decode through tree attention; 1 with chunked local attention, 1 with "
        "a sliding window through the host's kernels"
    ]
    batch, cache = cached(kind.batch())
    told(batch)
    metadata = builder.build(0, batch.common(**kind.changes))
    group = step_of(metadata).group
    assert [group.takes(layers.impls[0].deft_layer) for layers in (full, chunked, window)] == [
        True,
        False,
        False,
    ]
    for layers, size, plans in ((window, 9, 0), (full, None, 1), (window, 9, 1)):
        close(run(layers.impls[0], batch, cache, metadata), reference(batch, cache, window=size))
        assert state().counters().plans == plans
    whole = [len(batch.query)]
    assert rests == whole + [kind.rest] * bool(kind.rest) + whole


def test_layers_with_a_cache_of_another_dtype_are_not_counted():
    """As with ``--kv-cache-dtype-skip-layers``: bytes are counted for one dtype of cache."""
    shape, config = LayerShape(4, 2, 64), make_config()
    for at, cache in enumerate(("auto", "fp8", "fp8", "auto", "auto")):
        layer = Layer(shape, 0.125, 0.0, None, False, cache)
        context = config.compilation_config.static_forward_context
        context[f"model.layers.{at}.attn"] = SimpleNamespace(impl=SimpleNamespace(deft_layer=layer))
    assert len(divide_layers(config).tree) == 5
    spec = make_spec(num_kv_heads=2, head_size=64, dtype=torch.uint8)
    names = ["model.layers.1.attn", "model.layers.2.attn"]
    layers = LayerGroup(PlainCpuBackend, spec, names, config, torch.device("cpu"))
    group = build(layers, Settings(policy="deft-node"))
    assert (state().num_layers, state().dtype_bytes, group.tree_layers) == (2, 1, 2)


def test_sinks_that_the_hosts_implementation_hides_are_its_own():
    class Hiding(PlainCpuBackend.get_impl_cls()):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.hidden = self.__dict__.pop("sinks")

    backend = type("Hides", (PlainCpuBackend,), {"get_impl_cls": staticmethod(lambda: Hiding)})
    layers = Layers(tree_backend(backend), make_config(), 1, {"sinks": torch.zeros(HEADS)})
    assert "attention sinks" in layers.impls[0].deft_layer.reason

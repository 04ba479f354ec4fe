"""Models that mix full attention with other layers, on vLLM: who runs which layer."""

import logging
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from deft_backend.hosts.common.limits import LayerShape
from deft_backend.hosts.vllm.backend import tree_backend
from deft_backend.hosts.vllm.factory import LayerGroup, build
from deft_backend.hosts.vllm.layers import LINEAR, Layer, divide_layers, unsupported_kind
from deft_backend.hosts.vllm.step import step_of
from deft_backend.settings.config import Settings
from vllm_cpu_backend import PlainCpuBackend
from vllm_fakes import (
    DIM,
    HEADS,
    KV_HEADS,
    Batch,
    Layers,
    cached,
    close,
    make_config,
    make_spec,
    run,
    state,
    told,
    tree_layers,
)
from vllm_fakes import reference as expected

DECODE = [40, 45, 37, 50]
COMMON = {"block_size": 16, "head_size": DIM, "dtype": torch.float32, "num_kv_heads": KV_HEADS}
WINDOWED = SlidingWindowSpec(sliding_window=9, **COMMON)
CHUNKED = ChunkedLocalAttentionSpec(attention_chunk_size=8, **COMMON)
STATE = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))


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
    with caplog.at_level(logging.INFO, "deft_backend"):
        builders = [windowed.builder(WINDOWED), chunked.builder(CHUNKED), full.builder(make_spec())]
    assert [line for line in caplog.messages if "layers decode through" in line] == [
        "deft: 2 of 6 layers decode through tree attention; 2 with a sliding window, 1 with "
        f"chunked local attention, 1 with {LINEAR} through the host's kernels"
    ]
    assert "not supported" not in caplog.text
    assert [builder.deft_group is None for builder in builders] == [True, True, False]

    batch, cache = cached(Batch(DECODE, shared=2))
    built = [builder.build(0, batch.common()) for builder in builders]
    assert [step_of(metadata) is None for metadata in built] == [True, True, False]
    close(run(windowed.impls[0], batch, cache, built[0]), expected(batch, cache, window=9))
    close(run(full.impls[0], batch, cache, built[2]), expected(batch, cache))
    found = state()
    assert (found.num_layers, found.counters().steps_tree) == (2, 1)


def test_a_layer_is_the_hosts_in_a_group_of_full_layers(kind, rests, caplog):
    """Without vLLM's hybrid cache manager, all layers have one kind of cache. The host's layers get
    the whole batch."""
    config = kind.config()
    full = layers_of(config, "full", make_spec())
    chunked = layers_of(config, "chunked", make_spec(attention_chunk_size=8))
    window = layers_of(config, "window", make_spec(sliding_window=9), sliding_window=9)
    spec = make_spec(attention_chunk_size=8, sliding_window=9)
    names = ["window.0", "chunked.0", "full.0"]
    with caplog.at_level(logging.INFO, "deft_backend"):
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
        close(run(layers.impls[0], batch, cache, metadata), expected(batch, cache, window=size))
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

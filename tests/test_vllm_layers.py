"""Which layers, caches and servers of vLLM go through tree attention, and where keys lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the adapter's tests run where vLLM is installed")

from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec
from vllm_fakes import DIM, KV_HEADS, Cache, make_config, make_spec

from deft_backend.hosts.vllm.factory import unsupported_server, unsupported_spec
from deft_backend.hosts.vllm.layers import LayerShape, layer_of
from deft_backend.hosts.vllm.layout import has_packed_layout, kv_views
from deft_backend.hosts.vllm.observe import original_backend
from deft_backend.hosts.vllm.server import data_rank, port_of


def constructor(
    num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
    alibi_slopes: Any = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
    logits_soft_cap: float | None = None, attn_type: Any = "decoder",
    kv_sharing_target_layer_name: str | None = None, sinks: Any = None, **extra: Any,
) -> None:  # fmt: skip
    """The arguments of vLLM's implementations."""


def test_the_arguments_are_read_however_they_are_given() -> None:
    layer = layer_of(constructor, (8, 128, 0.5, None, None, None, "auto", 30.0), {})
    assert layer == (LayerShape(8, 8, 128), 0.5, 30.0, None)
    layer = layer_of(constructor, (8, 64), {"scale": 1, "num_kv_heads": 2})
    assert layer == (LayerShape(8, 2, 64), 1.0, 0.0, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 0}, "a sliding window"),
        ({"alibi_slopes": [0.5]}, "alibi slopes"),
        ({"sinks": torch.zeros(8)}, "attention sinks"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "the KV cache of another layer"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a KV cache of kind fp8_e4m3"),
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"attn_type": SimpleNamespace(value="encoder_decoder")}, "of type encoder_decoder"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"chunk_lookback": 3}, "the argument chunk_lookback"),
        ({"chunk_lookback": -1}, None),
        ({"use_alibi_sqrt": False}, None),
        ({"kv_cache_dtype": "bfloat16"}, None),
    ],
)
def test_what_a_layer_must_not_have(changes: dict[str, Any], reason: str | None) -> None:
    given = {"num_heads": 8, "head_size": 64, "scale": 0.1, "num_kv_heads": 2, **changes}
    found = layer_of(constructor, (), given).reason
    assert found == reason if reason is None else reason in found


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN"])
def test_a_plain_layer_of_the_hosts_own_is_taken(name: str) -> None:
    """With the signatures, and the defaults, that the host's implementations really have."""
    impl = original_backend(name).get_impl_cls()
    init = impl.__init__.__get__(object.__new__(impl))
    plain = (8, 128, 0.1, 2, None, None, "auto", None, "decoder", None)
    assert layer_of(init, plain, {}) == (LayerShape(8, 2, 128), 0.1, 0.0, None)


def test_caches_of_other_kinds_are_refused() -> None:
    assert unsupported_spec(make_spec()) is None
    common = {"block_size": 16, "head_size": DIM, "dtype": torch.float32}
    window = SlidingWindowSpec(num_kv_heads=KV_HEADS, sliding_window=64, **common)
    assert "SlidingWindowSpec" in unsupported_spec(window)
    assert "MLAAttentionSpec" in unsupported_spec(MLAAttentionSpec(num_kv_heads=1, **common))
    assert "sliding window" in unsupported_spec(make_spec(sliding_window=64))
    assert "chunked" in unsupported_spec(make_spec(attention_chunk_size=64))
    assert "causal" in unsupported_spec(make_spec(non_causal=True))
    assert "values of 32" in unsupported_spec(make_spec(head_size_v=32))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"decode_context_parallel_size": 2}, "decode context parallel"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallel"),
        ({"use_ubatching": True}, "micro-batches"),
    ],
)
def test_servers_of_other_kinds_are_refused(changes: dict[str, Any], reason: str | None) -> None:
    found = unsupported_server(make_config(**changes))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("flag", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_a_server_that_can_sleep_is_refused(flag: str) -> None:
    """It drops what was allocated beside the KV cache, and the planner's constants are."""
    config = make_config()
    setattr(config.model_config, flag, True)
    assert unsupported_server(config) == f"sleep mode ({flag}) is not supported"


def test_results_that_must_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "batch-invariant mode is not supported" in unsupported_server(make_config())


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("padded", [0, 64])
def test_views_name_the_same_memory(order: str, padded: int) -> None:
    cache = Cache(5, 16, order, padded)
    keys, values = kv_views(cache.tensor, DIM)
    assert keys.shape == values.shape == (5, 16, KV_HEADS, DIM)
    assert torch.equal(keys, cache.keys)
    assert torch.equal(values, cache.values)
    keys[3, 7, 1, 5] = 99.0
    assert cache.tensor[3, 1, 7, 5] == 99.0
    values[3, 7, 1, 5] = 98.0
    assert cache.tensor[3, 1, 7, DIM + 5] == 98.0
    assert keys.stride(-1) == values.stride(-1) == 1


@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        (lambda b, n, h, d: (b, h, n, 2 * d), True),
        (lambda b, n, h, d: (b, n, h, 2 * d), False),
        (lambda b, n, h, d: (2, b, n, h, d), False),
        (lambda b, n, h, d: 1 / 0, False),
    ],
)
def test_a_layout_is_known_by_its_shape(shape: Any, packed: bool) -> None:
    assert has_packed_layout(SimpleNamespace(get_kv_cache_shape=shape)) is packed


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({}, None),
        ({"data_parallel_size": 2}, 0),
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, 1),
        ({"data_parallel_index": 1}, 1),  # a dense model's second engine is told it is alone
    ],
)
def test_engines_have_files_of_their_own(changes: dict[str, int], rank: int | None) -> None:
    assert data_rank(make_config(**changes).parallel_config) == rank


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ("api_server --port 8123 --model m", 8123),
        ("vllm serve m --port=81", 81),
        ("vllm serve m", 8000),
        ("vllm serve m --port", 8000),
        ("vllm serve --portal 5", 8000),
        ("vllm serve m --port 30000 --port 8001", 8001),
    ],
)
def test_the_port_is_read_from_the_command_line(words: str, port: int) -> None:
    assert port_of(words.split()) == port


@pytest.mark.parametrize(
    ("content", "words", "port"),
    [
        ("port: 8123\nmax-model-len: 9", "", 8123),
        ("port: 8123", "--port 8124", 8124),
        ("port: '8123'", "", 8123),
        ("max-model-len: 9", "", 8000),
        ("port: high", "", 8000),
        ("- port", "", 8000),
        ("{", "", 8000),
        (None, "", 8000),
    ],
)
def test_the_port_may_be_in_the_servers_file(
    tmp_path: Path, content: str | None, words: str, port: int
) -> None:
    path = tmp_path / "server.yaml"
    if content is not None:
        path.write_text(content)
    assert port_of(["vllm", "serve", "m", "--config", str(path), *words.split()]) == port

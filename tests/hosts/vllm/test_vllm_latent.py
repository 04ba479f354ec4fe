"""MLA in vLLM: refusals by name, and layers that decode over a plan of latent vectors."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from deft_backend.attention import LatentAttention
from deft_backend.attention.reference_attention import reference_attention
from deft_backend.hosts.vllm.step.backend import cannot_surround, tree_backend
from deft_backend.hosts.vllm.step.cpu import PlainCpuBackend
from deft_backend.hosts.vllm.step.group import GroupAttention
from deft_backend.hosts.vllm.step.step import attach, step_of
from failure_lines import raising
from vllm_fakes import Batch, Layers, make_config, speculating, state

HEADS, VALUE, ROPE, PAGE = 4, 64, 32, 16
SCALE = 0.3
DECODE = [40, 37, 33, 65, 5]


class HostImplementation:
    """As FLASH_ATTN_MLA's: decode is ``forward_mqa``. The results of this one are all 5."""

    need_to_return_lse_for_decode = False

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
        kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, **mla,
    ):  # fmt: skip
        self.num_heads, self.scale = num_heads, scale

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        tokens = len(q[0] if isinstance(q, tuple) else q)
        return torch.full((tokens, self.num_heads, VALUE), 5.0), None


class Mla(PlainCpuBackend):
    is_mla = classmethod(lambda cls: True)
    get_name = staticmethod(lambda: "FLASH_ATTN_MLA")
    get_impl_cls = staticmethod(lambda: HostImplementation)


class FlashMla(Mla):
    get_name = staticmethod(lambda: "FLASHMLA")


class Sparse(Mla):
    is_sparse = classmethod(lambda cls: True)


ARGUMENTS = {
    "num_heads": HEADS, "head_size": VALUE + ROPE, "scale": SCALE, "num_kv_heads": 1,
    "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
    "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
    "q_lora_rank": None, "kv_lora_rank": VALUE, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE,
    "qk_head_dim": 48, "v_head_dim": 16, "kv_b_proj": object(), "indexer": None,
}  # fmt: skip


def spec(**changes):
    made = MLAAttentionSpec(
        block_size=PAGE, num_kv_heads=1, head_size=VALUE + ROPE, dtype=torch.float32,
        cache_dtype_str="auto",
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setenv("DEFT_MLA", "1")


def layers(config=None, **arguments):
    return Layers(
        tree_backend(Mla), config or make_config(), arguments={**ARGUMENTS, **arguments},
        spec=spec(),
    )  # fmt: skip


class Step:
    """A batch with its metadata, queries and a cache of latent vectors."""

    def __init__(self, batch, made=None):
        self.batch, self.layers = batch, made or layers()
        self.builder = self.layers.builder(spec())
        self.metadata = self.builder.build(0, batch.common())
        generator = torch.Generator().manual_seed(len(batch.lens))
        tokens = len(batch.query)
        # As vLLM's: the rotated parts are a slice of a projection.
        self.nope = torch.randn(tokens, HEADS, VALUE, generator=generator)
        self.rope = torch.randn(tokens, HEADS, 16 + ROPE, generator=generator)[..., 16:]
        self.cache = torch.randn(batch.pages, PAGE, VALUE + ROPE, generator=generator)

    def run(self, layer=0, *, in_one=False):
        q = torch.cat([self.nope, self.rope], -1) if in_one else (self.nope, self.rope)
        out, lse = self.layers.impls[layer].forward_mqa(q, self.cache, self.metadata, None)
        assert lse is None
        return out

    def check(self, **how):
        rows = int((self.batch.lens > 0).sum())
        keys = self.cache.unsqueeze(2)
        q = torch.cat([self.nope, self.rope], -1)[:rows]
        want = reference_attention(
            q, keys, keys, self.batch.table, self.batch.lens[:rows], sm_scale=SCALE
        )[..., :VALUE]
        for layer in range(self.layers.count):
            found = self.run(layer, **how)
            torch.testing.assert_close(found[:rows].double(), want, rtol=1e-5, atol=1e-5)
            assert not found.isnan().any()

    @property
    def is_hosts(self):
        return bool(self.run().eq(5.0).all())


@pytest.mark.parametrize("in_one", [False, True])
def test_layers_decode_over_a_device_plan(in_one, monkeypatch):
    planned = []
    plan = LatentAttention.plan_on_device
    monkeypatch.setattr(
        LatentAttention, "plan_on_device",
        lambda self, *args, **kwargs: planned.append(plan(self, *args, **kwargs)),
    )  # fmt: skip
    step = Step(Batch(DECODE, shared=2))
    assert step_of(step.metadata) is not None
    planned.clear()  # that of the check at start
    step.check(in_one=in_one)
    assert len(planned) == 1  # the first layer plans for all
    counters = state().counters()
    assert (counters.steps_tree, counters.decode_steps) == (1, 1)


def test_padding_requests_of_a_graph():
    step = Step(Batch(DECODE, shared=2, padding=3))
    step.check()


def test_a_graph_serves_other_batches_of_its_size():
    """The host fills the same tensors again; a captured graph repeats the launches."""
    step = Step(Batch([1700, 1650, 1603, 1601], shared=100))
    step.check()
    other = Batch([40, 37, 33, 0], shared=2)
    step.batch.table.zero_()
    step.batch.table[:, : other.table.shape[1]] = other.table
    step.batch.lens.copy_(other.lens)
    step.check()


def test_the_state_counts_bytes_of_one_vector():
    Step(Batch(DECODE, shared=2))
    assert state().token_bytes == (VALUE + ROPE) * 4


def test_other_steps_are_the_hosts():
    prefill = Step(Batch([40, 37], shared=2, query_lens=[3, 1]))
    assert step_of(prefill.metadata) is None
    assert prefill.is_hosts
    step = Step(Batch(DECODE, shared=2))
    step.layers.impls[0].need_to_return_lse_for_decode = True
    assert step.is_hosts
    attach(step.metadata, None)
    step.layers.impls[0].need_to_return_lse_for_decode = False
    assert step.is_hosts


def test_a_kernel_that_fails_leaves_decode_to_the_host(monkeypatch, failures):
    step = Step(Batch(DECODE, shared=2))
    monkeypatch.setattr(LatentAttention, "run", raising(RuntimeError("planted")))
    assert step.is_hosts
    assert "a kernel failed (RuntimeError('planted'))" in failures.pop()
    step.metadata = step.builder.build(0, step.batch.common())
    assert step_of(step.metadata) is None


def test_a_check_at_start_decides(monkeypatch, caplog):
    from deft_backend.attention import latent_check

    monkeypatch.setattr(latent_check, "TOLERANCE", 0.0)
    step = Step(Batch(DECODE, shared=2))
    assert step.builder.deft_group is None
    assert "computes other results than float64" in caplog.text
    assert step.is_hosts


@pytest.mark.parametrize(
    ("host", "asked", "reason"),
    [
        (Mla, "0", "DEFT_MLA=1"), (FlashMla, "1", "MLA through FLASHMLA"),
        (Sparse, "1", "sparse MLA"),
    ],
)  # fmt: skip
def test_backends_that_are_refused(host, asked, reason, monkeypatch):
    monkeypatch.setenv("DEFT_MLA", asked)
    assert reason in cannot_surround(host)


@pytest.mark.parametrize(
    ("arguments", "environment", "changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, {}, "MLA over a KV cache of kind fp8"),
        ({"indexer": object()}, {}, {}, "the argument indexer"),
        ({"sliding_window": 128}, {}, {}, "a sliding window"),
        ({"num_heads": 64}, {}, {}, "sharing would gain nothing"),
        ({}, {"DEFT_POLICY": "deft-node"}, {}, "DEFT_POLICY"),
        ({}, {"DEFT_PLANNER": "host"}, {}, "DEFT_PLANNER"),
        ({}, {}, {"speculative_config": speculating(3)}, "MLA with speculation"),
        ({}, {}, {"decode_context_parallel_size": 2}, "decode context parallel"),
    ],
)
def test_layers_that_are_refused(arguments, environment, changes, reason, monkeypatch, caplog):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    builder = layers(make_config(**changes), **arguments).builder(spec())
    assert builder.deft_group is None
    assert reason in caplog.text


def test_a_cache_of_bytes_is_refused(caplog):
    made = layers()
    assert made.builder(spec(cache_dtype_str="fp8_ds_mla")).deft_group is None
    assert "cache_dtype_str=fp8_ds_mla" in caplog.text


def test_verification_of_results_keeps_the_hosts(monkeypatch, failures):
    """``DEFT_VERIFY``: the host's results are all 5, so they differ."""
    monkeypatch.setenv("DEFT_VERIFY", "1")
    step = Step(Batch(DECODE, shared=2))
    assert isinstance(step.builder.deft_group, GroupAttention)
    assert step.is_hosts
    assert "differ by" in failures.pop()

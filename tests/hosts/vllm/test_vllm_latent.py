"""MLA in vLLM: refusals by name, and layers that decode over a plan of latent vectors."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import vllm_fakes as fakes
from attention_checks import latent_attention
from deft_backend.attention import LatentAttention, self_check
from deft_backend.hosts.common.limits import Unsupported
from deft_backend.hosts.vllm import latent, server
from deft_backend.hosts.vllm.backend import cannot_surround, tree_backend
from deft_backend.hosts.vllm.step import step_of
from deft_backend.settings.config import Settings
from deft_patches.vllm import tree_graphs
from failure_lines import raising
from flash_attention_3 import FORWARD, attend, check_answers
from vllm_cpu_backend import PlainCpuBackend

HEADS, VALUE, ROPE, PAGE = 4, 64, 32, 16
SCALE = 0.3
DECODE = [40, 37, 33, 65, 5]


class Mla(PlainCpuBackend):
    is_mla = classmethod(lambda cls: True)
    get_name = staticmethod(lambda: "FLASH_ATTN_MLA")
    get_impl_cls = staticmethod(lambda: fakes.LatentImplementation)


class FlashMla(Mla):
    get_name = staticmethod(lambda: "FLASHMLA")


class Sparse(Mla):
    is_sparse = classmethod(lambda cls: True)


_UNUSED = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")
_HEADS = {"num_heads": HEADS, "head_size": VALUE + ROPE, "scale": SCALE, "num_kv_heads": 1}
_KINDS = {"kv_cache_dtype": "auto", "attn_type": "decoder", "kv_b_proj": object()}
_RANKS = {"kv_lora_rank": VALUE, "qk_nope_head_dim": 16, "qk_rope_head_dim": ROPE}
_DIMS = {"qk_head_dim": 48, "v_head_dim": 16, "q_lora_rank": None, "indexer": None}
ARGUMENTS = {**dict.fromkeys(_UNUSED), **_HEADS, **_KINDS, **_RANKS, **_DIMS}


def spec(**changes):
    made = MLAAttentionSpec(
        block_size=PAGE,
        num_kv_heads=1,
        head_size=VALUE + ROPE,
        dtype=torch.float32,
        cache_dtype_str="auto",
    )
    return replace(made, **changes)


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setenv("DEFT_MLA", "1")


def layers(config=None, count=2, **arguments):
    return fakes.Layers(
        tree_backend(Mla),
        config or fakes.make_config(),
        count,
        {**ARGUMENTS, **arguments},
        spec=spec(),
    )


class Step(fakes.Step):
    """A batch with its metadata, queries and a cache of latent vectors.

    `rows`: of its queries, with those of padding requests.
    """

    in_one = False  # whether the host gives both parts of a query in one tensor

    def __init__(self, batch, made=None, rows=None):
        self.batch, self.layers = batch, made or layers()
        tokens = rows or len(batch.query)
        self.changes, self.builder = {"num_actual_tokens": tokens}, self.layers.builder(spec())
        self.build()
        generator = torch.Generator().manual_seed(len(batch.lens))
        # As vLLM's: the rotated parts are a slice of a projection.
        self.nope = torch.randn(tokens, HEADS, VALUE, generator=generator)
        self.rope = torch.randn(tokens, HEADS, 16 + ROPE, generator=generator)[..., 16:]
        self.cache = torch.randn(batch.pages, PAGE, VALUE + ROPE, generator=generator)
        batch.query = torch.cat([self.nope, self.rope], -1)

    def build(self, name=""):
        """The metadata of the batch, after the scheduler's message."""
        if server._current.prefixes is not None:
            server._current.prefixes.observe(fakes.message(self.batch, name))
        super().build()

    def run(self, layer=0, *, metadata=None):
        q = self.batch.query if self.in_one else (self.nope, self.rope)
        metadata = metadata or self.metadata
        out, lse = self.layers.impls[layer].forward_mqa(q, self.cache, metadata, None)
        assert lse is None
        return out

    def expected(self):
        """Without the rows of padding."""
        keys = self.cache.unsqueeze(2)
        found = fakes.reference(self.batch, SimpleNamespace(keys=keys, values=keys), scale=SCALE)
        return found[: int(self.batch.starts[-1]), :, :VALUE]

    @property
    def is_hosts(self):
        return bool(self.run().eq(5.0).all())


@pytest.mark.parametrize("in_one", [False, True])
def test_layers_decode_over_one_plan(in_one, monkeypatch):
    planned = []
    plan = LatentAttention.plan_batch
    monkeypatch.setattr(
        LatentAttention,
        "plan_batch",
        lambda self, *args, **kwargs: planned.append(args) or plan(self, *args, **kwargs),
    )
    step = Step(fakes.Batch(DECODE, shared=2))
    planned.clear()  # of the check at start
    assert step.tree is not None
    step.in_one = in_one
    step.check()
    assert len(planned) == 1  # the first layer plans for all
    counters = fakes.state().counters()
    assert (counters.steps_tree, counters.decode_steps) == (1, 1)
    assert fakes.state().token_bytes == (VALUE + ROPE) * 4  # one vector


def test_a_graph_serves_other_batches_of_its_size():
    """The host fills the same tensors again; a captured graph repeats the launches."""
    step = Step(fakes.Batch([1700, 1650, 1603, 1601], shared=100))
    step.check()
    other = fakes.Batch([40, 37, 33, 0], shared=2)
    step.batch.table.zero_()
    step.batch.table[:, : other.table.shape[1]] = other.table
    step.batch.lens.copy_(other.lens)
    step.check()


def chains(batch, rows=None, **changes):
    """The step of a server that verifies three drafts and the token before them."""
    config = fakes.make_config(speculative_config=fakes.speculating(3), **changes)
    return Step(batch, layers(config), rows)


@pytest.mark.parametrize(("query_lens", "padding"), [([4] * 5, 0), ([4, 4, 4, 0, 0], 2)])
def test_chains_of_drafts(query_lens, padding):
    """vLLM pads tokens and requests; padding requests of chains have no tokens, and rows."""
    lens, verified = DECODE[: 5 - padding], sum(query_lens)
    step = chains(fakes.Batch(lens, shared=2, query_lens=query_lens, padding=padding), rows=20)
    assert step.tree.query_tokens == 4
    step.check()
    found = fakes.state().counters()
    assert (found.steps_tree, found.plans, found.verified_tokens) == (1, 1, verified)
    assert not found.steps_host
    assert step.run()[verified:].eq(0.0).all()


@pytest.mark.parametrize(
    ("query_lens", "padding", "rows"),
    [
        ([1] * 5, 0, None),  # a step without drafts
        ([3] * 5, 0, None),  # fewer drafts, as in dynamic speculation
        ([4, 4, 4, 4, 1], 0, None),
        ([4, 1, 4, 4, 4], 0, None),  # near the context's end
        ([4, 4, 4, 4, 1], 0, 20),  # the same, padded to as many rows as full chains have
        ([4, 4, 4, 3, 2, 3], 1, 24),
        ([4, 4, 4, 0, 4, 4], 1, 24),
        ([4] * 5, 0, 24),
    ],
)
def test_batches_that_lack_drafts_are_the_hosts(query_lens, padding, rows):
    step = chains(fakes.Batch(DECODE, shared=2, query_lens=query_lens, padding=padding), rows)
    assert step.tree is None
    assert step.is_hosts
    assert not step.builder.deft_group.takes_step()
    found = fakes.state().counters()
    assert (found.steps_tree, found.verified_tokens) == (0, 0)
    assert found.steps_host == {latent.UNEVEN: 1}


def test_prompts_as_long_as_a_chain_are_computed_like_chains():
    batch = fakes.Batch(DECODE, shared=2, query_lens=[4] * 5)
    step = chains(batch)
    prefilling = torch.tensor([False, False, True, False, False])
    step.metadata = step.builder.build(0, batch.common(is_prefilling=prefilling))
    assert step.builder.deft_group.takes_step()
    step.check()


def test_a_drafter_is_the_hosts_with_the_targets_metadata():
    """Its first pass runs with that of the verification."""
    config = fakes.make_config(speculative_config=fakes.speculating(3))
    target = layers(config)
    drafter = fakes.Layers(target.backend, config, 1, ARGUMENTS, "model.layers.2.self_attn", spec())
    step = Step(fakes.Batch(DECODE, shared=2, query_lens=[4] * 5), target)
    q = (step.nope, step.rope)
    assert step.tree is not None
    out, _ = drafter.impls[0].forward_mqa(q, step.cache, step.metadata, None)
    assert out.eq(5.0).all()
    assert fakes.state().counters().plans == 0
    step.check()
    assert fakes.state().num_layers == target.count


def test_other_steps_are_the_hosts():
    prefill = Step(fakes.Batch([40, 37], shared=2, query_lens=[3, 1]))
    assert step_of(prefill.metadata) is None
    assert prefill.is_hosts
    assert fakes.state().counters().steps_host == {"batch smaller than DEFT_MIN_BATCH=2": 1}
    mixed = Step(fakes.Batch([40, 37, 33], shared=2, query_lens=[1, 1, 3]))
    assert mixed.is_hosts
    assert fakes.state().counters().steps_host == {"a step with prefills over MLA": 1}
    step = Step(fakes.Batch(DECODE, shared=2))
    step.layers.impls[0].need_to_return_lse_for_decode = True
    assert step.is_hosts
    step.metadata.deft_step = None
    step.layers.impls[0].need_to_return_lse_for_decode = False
    assert step.is_hosts


@pytest.mark.parametrize("at", ["run", "verify", "sharing"])
def test_after_a_failure_the_host_decodes(at, monkeypatch, failures):
    """Its results are all 5, so ``DEFT_VERIFY`` finds a difference."""
    monkeypatch.setenv("DEFT_VERIFY", str(int(at == "verify")))
    step = Step(fakes.Batch(DECODE, shared=2))
    with monkeypatch.context() as patch:
        if at != "verify":
            owner, name = {
                "run": (LatentAttention, "run"),
                "sharing": (latent.LatentSharing, "too_little"),
            }[at]
            patch.setattr(owner, name, raising(ValueError("planted")))
        if at == "sharing":
            step.build()
        assert step.is_hosts
    assert ("differ by" if at == "verify" else "planted") in failures.pop()
    reason = "planning failed" if at == "sharing" else "kernel failed"
    assert at == "verify" or reason in fakes.state().counters().steps_host
    if at != "sharing":
        step.build()
        assert step.is_hosts


def test_a_check_at_start_decides(monkeypatch, caplog):
    monkeypatch.setattr(self_check, "LATENT_TOLERANCE", 0.0)
    step = Step(fakes.Batch(DECODE, shared=2))
    assert step.builder.deft_group is None
    assert "computes other results than float64" in caplog.text
    assert step.is_hosts


@pytest.mark.parametrize(
    ("host", "setting", "reason"),
    [
        (Mla, "DEFT_MLA=0", "DEFT_MLA=0 leaves MLA models"),
        (Mla, "VLLM_BATCH_INVARIANT=1", "batch-invariant mode of MLA models is not supported"),
        (FlashMla, "DEFT_MLA=1", "MLA through FLASHMLA"),
        (Sparse, "DEFT_MLA=1", "sparse MLA"),
    ],
)
def test_backends_that_are_refused(host, setting, reason, monkeypatch):
    monkeypatch.setenv(*setting.split("="))
    assert reason in cannot_surround(host)


@pytest.mark.parametrize(
    ("arguments", "policy", "config", "cache", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "", {}, {}, "MLA over a KV cache of kind fp8"),
        ({"indexer": object()}, "", {}, {}, "the argument indexer"),
        ({"sliding_window": 128}, "", {}, {}, "a sliding window"),
        ({"num_heads": 64}, "", {}, {}, "sharing would gain nothing"),
        ({}, "deft-node", {}, {}, "DEFT_POLICY"),
        ({}, "", {"decode_context_parallel_size": 2}, {}, "decode context parallel"),
        ({}, "", {"data_parallel_size": 2}, {}, "MLA with data parallelism"),
        ({}, "", {"enable_elastic_ep": True}, {}, "MLA with data parallelism"),
        ({}, "", {}, {"cache_dtype_str": "fp8_ds_mla"}, "cache_dtype_str=fp8_ds_mla"),
        ({"num_heads": 8}, "", {"speculative_config": fakes.speculating(3)}, {}, None),
        (
            *({"num_heads": 8}, "", {"speculative_config": fakes.speculating(4)}, {}),
            "40 query vectors a request (8 heads, 5 query tokens) leave no room",
        ),
    ],
)
def test_layers_that_are_refused(arguments, policy, config, cache, reason, monkeypatch, caplog):
    monkeypatch.setenv("DEFT_POLICY", policy)
    builder = layers(fakes.make_config(**config), **arguments).builder(spec(**cache))
    assert (builder.deft_group is None) == (reason is not None)
    assert (reason or "") in caplog.text


class Manager:
    """As vLLM's manager of graphs: a graph runs on the tensors that it was captured with."""

    def __init__(self, step):
        self.step, self.vllm_config = step, step.layers.config
        self.graphs, self.captured = {}, []
        self._capture_descs = {CUDAGraphMode.PIECEWISE: [1, 4], CUDAGraphMode.FULL: [4]}

    def capture(self, model):
        for mode, sizes in self._capture_descs.items():
            for size in sizes:
                self.captured.append(mode.name)
                if mode is CUDAGraphMode.FULL:
                    common = self.step.batch.common(**self.step.changes)
                    metadata = self.step.builder.build_for_cudagraph_capture(common)
                    self.graphs[size] = partial(self.step.run, metadata=metadata)

    def run_fullgraph(self, desc):
        return self.graphs[desc]()


@pytest.fixture
def second_set(monkeypatch):
    monkeypatch.setattr(tree_graphs, "_controllers", {})
    monkeypatch.setattr("vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager", Manager)
    for name in ("capture", "run_fullgraph"):
        monkeypatch.setattr(Manager, name, getattr(Manager, name))  # unwrapped afterwards

    def managed(step, config=None):
        """A manager, after a second set was installed for a configuration: the step's."""
        tree_graphs.install(config or step.layers.config, step.builder.deft_group)
        return Manager(step)

    return managed


@pytest.mark.parametrize("tokens", [1, 4])
def test_each_step_replays_the_graph_that_its_sharing_asks_for(tokens, second_set):
    """Steps that share replay the second set. Chains of which a request lacks drafts never do."""
    lens = [40, 37, 33, 65]
    batch = fakes.Batch(lens, shared=0, query_lens=[tokens] * 4)
    step = Step(batch) if tokens == 1 else chains(batch)
    manager = second_set(step)
    manager.capture("model")
    assert manager.captured == ["PIECEWISE", "PIECEWISE", "FULL", "FULL"]
    before = fakes.state().counters().steps_tree
    for at, (shared, last) in enumerate(((2, tokens), (2, 1), (0, tokens), (2, tokens))):
        step.batch.table.copy_(fakes.Batch(lens, shared=shared).table)
        step.batch.starts[-1] = 3 * tokens + last
        step.build(f"batch {at}, request ")
        found = manager.run_fullgraph(4)
        if shared and last == tokens:
            fakes.close(found, step.expected())
        else:
            assert found.eq(5.0).all()
    counters, taken = fakes.state().counters(), 3 if tokens == 1 else 2
    assert counters.steps_tree - before == taken
    lacking = {latent.UNEVEN: 1} if tokens > 1 else {}
    assert counters.steps_host == {"shares nothing": 2, **lacking}  # the first step, too
    # Without attention metadata of its own, a batch replays the host's graph.
    step.builder.build_for_cudagraph_capture(step.batch.common(**step.changes))
    assert manager.run_fullgraph(4).eq(5.0).all()


def test_what_has_no_second_set_captures_and_replays_the_hosts(second_set, caplog):
    """Another configuration's manager, and a manager whose graphs lie elsewhere."""
    step = Step(fakes.Batch([40, 37, 33, 65], shared=2))
    manager = second_set(step, fakes.make_config())
    manager.capture("model")
    assert manager.captured == ["PIECEWISE", "PIECEWISE", "FULL"]
    assert manager.run_fullgraph(4).eq(5.0).all()
    for name in ("graphs", "_capture_descs"):
        manager = second_set(step)
        manager._capture_descs = {}
        setattr(manager, name, MappingProxyType({}))
        manager.capture("model")
        assert not hasattr(manager, "deft_graphs")
    assert caplog.text.count("no second set of graphs can be captured") == 2


def test_the_hosts_memory_profile_foresees_the_second_set(second_set):
    """It extrapolates from the bytes of its largest graphs, in order."""
    step = Step(fakes.Batch([40, 37, 33, 65], shared=2))
    second_set(step, earlier := fakes.make_config())  # of a configuration before
    manager = second_set(step)
    assert id(earlier) not in tree_graphs._controllers
    manager._capture_descs = {CUDAGraphMode.FULL: [4, 4]}
    manager._capture_mem_samples = samples = []
    build, costs = step.builder.build_for_cudagraph_capture, []

    def built(common):
        if not costs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        samples.append(costs.pop(0))
        return build(common)

    step.builder.build_for_cudagraph_capture = built
    for costs[:], profile in (
        ([300, 20, 600, 100], [300 + 600, 20 + 100]),
        ([300, 20, 600], [300 + 600, 20]),  # the last graph does not fit
    ):
        samples.clear()
        manager.capture("model")
        assert samples == profile


@pytest.mark.parametrize(
    ("error", "ranks", "stops"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 1, False),
        (RuntimeError("CUDA error: out of memory"), 1, False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, True),
        (RuntimeError("planted"), 1, True),
    ],
)
def test_a_second_set_without_memory(error, ranks, stops, second_set, caplog):
    step = Step(fakes.Batch([40, 37, 33, 65], shared=2))
    group = step.builder.deft_group
    manager = second_set(step)
    step.layers.config.parallel_config.tensor_parallel_size = ranks
    build = step.builder.build_for_cudagraph_capture
    step.builder.build_for_cudagraph_capture = lambda common: (
        raising(error)() if group._captures_tree else build(common)
    )
    with pytest.raises(type(error)) if stops else nullcontext():
        manager.capture("model")
    assert ("does not fit into memory" in caplog.text) == ("out of memory" in str(error))
    assert not group._captures_tree
    step.build()
    assert manager.run_fullgraph(4).eq(5.0).all()


def test_mla_needs_the_graphs_of_model_runner_v2():
    config = fakes.make_config()
    config.use_v2_model_runner = False
    with pytest.raises(Unsupported, match="VLLM_USE_V2_MODEL_RUNNER=1"):
        latent.latent_attention(
            SimpleNamespace(value_dim=VALUE), config, torch.device("cuda"), Settings()
        )


def shared_by(batch, gains=True):
    """What decides on a GPU, where costs count."""
    asked = []
    attention = SimpleNamespace(
        device=torch.device("cuda"), gains=lambda forest, layers: (asked.append(forest), gains)[1]
    )
    sharing = latent.LatentSharing(attention, 27, PAGE)
    if batch is not None:
        sharing.observe(fakes.message(batch))
    return sharing, asked


@pytest.mark.parametrize(("tokens", "gains"), [(1, True), (4, False)])
def test_costs_count_query_tokens(tokens, gains):
    """Chains cost a second call, and a tile holds fewer of their requests."""
    lens = [8448] * 64
    size = {"num_query_heads": 8, "page_size": PAGE, "max_batch": 64, "query_tokens": tokens}
    attention = latent_attention(**size)
    asked = SimpleNamespace(device=torch.device("cuda"), gains=attention.gains)
    sharing = latent.LatentSharing(asked, 27, PAGE)
    sharing.observe(fakes.message(fakes.Batch(lens, shared=512, query_lens=[tokens] * 64)))
    assert (sharing.too_little() is None) is gains


def test_costs_decide_once_for_the_requests_of_a_batch():
    batch = fakes.Batch(DECODE, shared=2)
    assert shared_by(None)[0].too_little() == latent.UNKNOWN
    sharing, asked = shared_by(batch, gains=False)
    told = fakes.message(batch, scheduled_new_reqs=[])
    for _ in range(3):
        assert sharing.too_little() == "shares too little to be faster"
        sharing.observe(told)
    assert len(asked) == 1
    assert (asked[0].batch_size, asked[0].tokens_attended) == (5, 16 * (3 + 3 + 3 + 5 + 1))
    assert asked[0].page_size == PAGE
    told.num_scheduled_tokens["of another worker"] = 1
    sharing.observe(told)
    assert sharing.too_little() == latent.UNKNOWN
    for request in ("of another worker", "4"):
        del told.num_scheduled_tokens[request]
    sharing.observe(told)
    sharing.too_little()
    assert len(asked) == 2
    assert shared_by(batch, gains=True)[0].too_little() is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [((0, 7, -7), "another rank has no tree"), ((1, 6, -7), "different settings"), (None, None)],
)
def test_ranks_capture_the_same_graphs(flags, reason, monkeypatch, caplog):
    """`flags`: what an exchange with the other ranks leaves; None: what this rank gave."""

    def exchange(tensor, op, group):
        if flags is not None:
            tensor.copy_(torch.tensor(flags))

    monkeypatch.setattr(torch.distributed, "all_reduce", exchange)
    group = SimpleNamespace(world_size=2, cpu_group=None, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    step = Step(fakes.Batch(DECODE, shared=2), layers(fakes.make_config(tensor_parallel_size=2)))
    held = step.builder.deft_group
    assert (held is None) == (reason is not None)
    assert reason is None or reason in caplog.text
    if held is not None:  # graphs are a GPU's
        installed, config = [], step.layers.config
        monkeypatch.setattr(tree_graphs, "install", lambda *given: installed.append(given))
        for device in ("cpu", "cuda"):
            held.attention.device = torch.device(device)
            assert latent.capture_both(held, config, held.settings) is None
        assert installed == [(config, held)]


@pytest.mark.parametrize("causal", [False, True])
def test_what_the_hosts_operator_is_asked(causal, monkeypatch):
    def forward(*arguments):
        given = dict(zip(FORWARD, arguments, strict=True))
        names = ("q", "qv", "k", "v", "page_table", "kv_batch_idx", "cu_seqlens_q", "leftpad_k")
        names += ("seqused_k", "softmax_scale", "causal")
        out, lse = attend(*(given.pop(name) for name in names))
        assert {name: value for name, value in given.items() if value is not None} == {
            "max_seqlen_q": 3,
            "max_seqlen_k": 6,
            "window_left": -1,
            "window_right": -1,
            "softcap": 0.0,
            "rotary_interleaved": True,
            "num_splits": 7,
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        return out, lse, "accumulators"

    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=forward), raising=False)
    monkeypatch.setitem(
        sys.modules, "vllm.vllm_flash_attn", SimpleNamespace(flash_attn_interface=0)
    )
    check_answers(latent.vllm_latent_attention, causal)

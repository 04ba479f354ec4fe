"""The data of a vLLM worker, without a worker: configuration, KV cache, batches, layers."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import CommonAttentionMetadata

from deft_backend.attention.reference_attention import reference_attention
from deft_backend.hosts.vllm import group, server
from deft_backend.hosts.vllm.backend import tree_backend
from deft_backend.hosts.vllm.step import step_of
from deft_backend.telemetry.metrics import StateCollector
from vllm_cpu_backend import PlainCpuBackend

HEADS, KV_HEADS, DIM = 4, 2, 64


def make_config(**changes):
    """The parts of a ``VllmConfig`` that the adapter reads."""
    kinds = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    sizes = dict.fromkeys([f"{kind}_parallel_size" for kind in kinds], 1)
    ranks = dict.fromkeys(["rank", "data_parallel_rank", "data_parallel_index"], 0)
    executor = {"use_ubatching": False, "distributed_executor_backend": None}
    parallel = SimpleNamespace(**sizes, **ranks, **executor)
    model = SimpleNamespace(
        dtype=torch.float32,
        max_model_len=2048,
        enable_sleep_mode=False,
        enable_cumem_allocator=False,
        rswa_window=None,
        hf_text_config=SimpleNamespace(num_hidden_layers=2),
    )
    scheduler, layout = SimpleNamespace(max_num_seqs=16), changes.pop("layout", "LBNHC")
    config = SimpleNamespace(
        parallel_config=parallel,
        speculative_config=None,
        model_config=model,
        scheduler_config=scheduler,
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_capture_sizes=[], max_cudagraph_capture_size=None
        ),
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: kv_cache_interface.KVCacheLayout[layout],
            enable_prefix_caching=True,
            block_size=16,
        ),
    )
    for name, value in changes.items():
        owners = [part for part in (config, model, scheduler) if hasattr(part, name)]
        setattr((*owners, parallel)[0], name, value)
    return config


def speculating(tokens, **changes):
    """A ``SpeculativeConfig`` that drafts `tokens` tokens, as far as the adapter reads it."""
    return SimpleNamespace(num_speculative_tokens=tokens, **changes)


def make_spec(block_size=16, **changes):
    shape = {"num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.float32}
    return kv_cache_interface.FullAttentionSpec(**{"block_size": block_size, **shape, **changes})


@dataclass
class Layers:
    """Layers of one model behind one backend class, registered in a configuration."""

    backend: type
    config: SimpleNamespace
    count: int = 2
    arguments: dict = field(default_factory=dict)
    prefix: str = "layer"
    spec: object = None
    """The layers' own cache specification; None: only their arguments describe them."""

    def __post_init__(self):
        self.impls = []
        context = self.config.compilation_config.static_forward_context
        for index in range(self.count):
            shape = {"num_heads": HEADS, "head_size": DIM, "num_kv_heads": KV_HEADS}
            values = {**shape, "scale": DIM**-0.5, **self.arguments}
            impl = self.backend.get_impl_cls()(**values)
            module = SimpleNamespace(impl=impl)
            if self.spec is not None:
                module.get_kv_cache_spec = lambda vllm_config: self.spec
            context[f"{self.prefix}.{index}"] = module
            self.impls.append(impl)

    def builder(self, spec):
        names = [f"{self.prefix}.{index}" for index in range(self.count)]
        return self.backend.get_builder_cls()(spec, names, self.config, torch.device("cpu"))


class LatentImplementation:
    """As FLASH_ATTN_MLA's: decode is ``forward_mqa``. The results of this one are all 5."""

    need_to_return_lse_for_decode = False

    def __init__(self, num_heads, head_size, scale, **others):
        self.num_heads, self.scale, self.value_dim = num_heads, scale, others["kv_lora_rank"]

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        tokens = len(q[0] if isinstance(q, tuple) else q)
        return torch.full((tokens, self.num_heads, self.value_dim), 5.0), None


class Cache:
    """One layer's KV cache between those of two others, in a memory order of vLLM's.

    A layout names layers, blocks, heads, tokens (N) and content, outermost first. Other layers and
    padding hold NaN, so that a read of them shows.
    """

    LAYERS = 3

    def __init__(self, pages, block_size, layout="LBNHC", padded=0):
        generator = torch.Generator().manual_seed(pages + block_size)
        numbers = torch.randn((pages, KV_HEADS, block_size, 2 * DIM), generator=generator)
        sizes = {"L": self.LAYERS, "B": pages, "H": KV_HEADS, "N": block_size, "C": 2 * DIM}
        shape = [sizes[axis] for axis in layout]
        memory = torch.full((*shape[:2], math.prod(shape[2:]) + padded), float("nan"))
        memory = memory[..., : math.prod(shape[2:])].unflatten(-1, shape[2:])
        self.tensor = memory.permute([layout.index(axis) for axis in "LBHNC"])[1]
        self.tensor.copy_(numbers)

    @property
    def keys(self):
        """[pages, block_size, Hkv, D]: computed here, independently of the adapter."""
        return self.tensor.permute(0, 2, 1, 3)[..., :DIM]

    @property
    def values(self):
        return self.tensor.permute(0, 2, 1, 3)[..., DIM:]


@dataclass
class Batch:
    """Requests with their pages; the first `shared` pages are common to all of them."""

    seq_lens: list[int]
    shared: int
    block_size: int = 16
    query_lens: list[int] | None = None
    padding: int = 0
    first_page: int = 1

    def __post_init__(self):
        pages = max(-(-length // self.block_size) for length in self.seq_lens) + 1
        rows = len(self.seq_lens) + self.padding
        self.table = torch.zeros((rows, pages), dtype=torch.int32)
        common = list(range(self.first_page, self.first_page + self.shared))
        unused = self.first_page + self.shared
        for row, length in enumerate(self.seq_lens):
            needed = -(-length // self.block_size)
            held = min(self.shared, length // self.block_size)
            own = list(range(unused, unused + needed - held))
            unused += needed - held
            self.table[row, :needed] = torch.tensor(common[:held] + own, dtype=torch.int32)
        self.pages = unused
        lens = [*self.seq_lens, *[0] * self.padding]
        self.lens = torch.tensor(lens, dtype=torch.int32)
        # Padding requests of a graph have rows of queries, but no query tokens.
        queries = self.query_lens or [1] * len(self.seq_lens) + [0] * self.padding
        tokens = sum(queries) if self.query_lens else rows
        self.starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).to(torch.int32)
        generator = torch.Generator().manual_seed(len(lens) * 97 + sum(lens))
        fused = torch.randn((tokens, 2 * HEADS, DIM), generator=generator)
        self.query = fused[:, :HEADS]  # a part of a fused projection: tokens are far apart

    def common(self, **changes):
        rows = len(self.lens)
        queries = self.starts.diff()
        values = {
            "query_start_loc": self.starts,
            "query_start_loc_cpu": self.starts,
            "seq_lens": self.lens,
            "num_reqs": rows,
            "num_actual_tokens": len(self.query),
            "max_query_len": int(queries.max()),
            "max_seq_len": int(self.lens.max()),
            "block_table_tensor": self.table,
            "slot_mapping": torch.full((len(self.query),), -1, dtype=torch.int64),
            "seq_lens_cpu_upper_bound": self.lens,
            "causal": True,
            "is_prefilling": torch.zeros(rows, dtype=torch.bool),
            **changes,
        }
        return CommonAttentionMetadata(**values)


def message(batch, name="", **changes):
    """What vLLM's scheduler tells its worker before the step of a batch of new requests."""
    requests = [f"{name}{row}" for row in range(len(batch.seq_lens))]
    new = [
        SimpleNamespace(req_id=request, block_ids=(table[table > 0].tolist(),))
        for request, table in zip(requests, batch.table, strict=False)
    ]
    tokens = batch.starts.diff().tolist()
    cached_ones = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
    values = {
        "scheduled_new_reqs": new,
        "scheduled_cached_reqs": cached_ones,
        "num_scheduled_tokens": dict(zip(requests, tokens, strict=False)),
        "finished_req_ids": set(),
        "preempted_req_ids": None,
        **changes,
    }
    return SimpleNamespace(**values)


def cached(batch):
    return batch, Cache(batch.pages, batch.block_size)


class Step:
    """A batch that a builder has made the metadata of, and a cache that holds its pages.

    `changes`: of what the host says about the batch, in this step and in the next ones.
    """

    def __init__(self, batch, layers=None, changes=None, **spec):
        self.layers, self.changes = layers or tree_layers(), changes or {}
        self.builder = self.layers.builder(make_spec(batch.block_size, **spec))
        self.batch, self.cache = cached(batch)
        self.build()

    def build(self):
        self.metadata = self.builder.build(0, self.batch.common(**self.changes))

    @property
    def tree(self):
        """The step of tree attention, or None."""
        return step_of(self.metadata)

    def run(self, layer=0, rows=0, **how):
        return run(self.layers.impls[layer], self.batch, self.cache, self.metadata, rows, **how)

    def capture(self):
        """Run the first layer with metadata made for a capture, as in a capture of a graph."""
        captured = self.builder.build_for_cudagraph_capture(self.batch.common(**self.changes))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "capturing", lambda tensor: True)
            run(self.layers.impls[0], self.batch, self.cache, captured)

    def check(self, **attention):
        """Run every layer; each result is the reference's. The last one is returned."""
        expected = self.expected(**attention)
        for layer in range(self.layers.count):
            found = self.run(layer)
            close(found[: len(expected)], expected)
            assert not found.isnan().any()
        return found

    def expected(self, **attention):
        return reference(self.batch, self.cache, **attention)

    def check_quantised(self, kind, q_scale=1.0):
        """The first layer over a cache of 8 bits, as vLLM gives it: bytes, and a layer's scales."""
        dtype = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
        module = SimpleNamespace(
            _q_scale=torch.tensor(q_scale), _k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.5)
        )
        scales = torch.tensor([0.02, 0.5]).repeat_interleave(DIM)
        stored, query = (self.cache.tensor / scales).to(dtype), self.batch.query
        self.cache.tensor = stored.float() * scales  # what the bytes stand for
        if q_scale != 1.0:
            query = (query / q_scale).to(dtype)
            self.batch.query = query.float() * q_scale
        output = torch.full(query.shape, 7.0)
        impl = self.layers.impls[0]
        key, value = torch.full((2, len(query), KV_HEADS, DIM), float("nan"))
        stored = stored.view(torch.uint8)
        impl.forward(module, query, key, value, stored, self.metadata, output)
        close(output, reference(self.batch, self.cache))


def told(batch):
    """The scheduler tells the worker of the batch's requests, which have decoded before."""
    prefixes = server._current.prefixes
    prefixes.observe(message(replace(batch, query_lens=None)))
    prefixes.observe(message(batch, scheduled_new_reqs=[]))


@dataclass(frozen=True)
class Kind:
    """A kind of steps: requests that share two blocks."""

    name: str
    """As counters name it."""
    lens: list[int]
    query_lens: list[int] | None = None
    prefilling: list[bool] | None = None
    drafts: int = 0
    rest: int = 0
    """Query tokens that the host computes."""
    invariant: bool = False
    """In a server of the host's batch-invariant mode."""

    @property
    def decoding(self):
        """Contexts of the requests that decode."""
        prefilling = self.prefilling or [False] * len(self.lens)
        return [n for n, prompt in zip(self.lens, prefilling, strict=True) if not prompt]

    @property
    def rows(self):
        return len(self.decoding)

    @property
    def tokens(self):
        return sum(self.decoding)

    @property
    def changes(self):
        return {} if self.prefilling is None else {"is_prefilling": torch.tensor(self.prefilling)}

    def config(self):
        return make_config(speculative_config=speculating(self.drafts) if self.drafts else None)

    def layers(self, config=None, **kwargs):
        return tree_layers(config or self.config(), **{"prefix": "model.layers", **kwargs})

    def batch(self, shared=2, **changes):
        return Batch(self.lens, shared=shared, query_lens=self.query_lens, **changes)

    def step(self, layers=None, shared=2, changes=None, **spec):
        """A step of which the scheduler has told the worker."""
        layers, batch = layers or self.layers(), self.batch(shared)
        layers.builder(make_spec(**spec))
        told(batch)
        return Step(batch, layers, {**self.changes, **(changes or {})}, **spec)


KINDS = {
    "decode": Kind("decode", [40, 37, 33, 65, 5]),
    "verification": Kind("verification", [40, 37, 33, 65, 5], [5, 1, 1, 4, 2], drafts=4),
    # Three decode, one ends its prompt, one begins.
    "mixed": Kind(
        "mixed", [40, 37, 33, 50, 5], [1, 1, 1, 30, 5], [False] * 3 + [True] * 2, rest=35
    ),
    "picked": Kind(
        "mixed", [40, 37, 33, 50], [1] * 4, [False, True, False, False], rest=4, invariant=True
    ),
}


def state():
    return server._current.state


def tree_layers(config=None, **kwargs):
    """Layers behind tree attention around the CPU's backend."""
    return Layers(tree_backend(PlainCpuBackend), config or make_config(), **kwargs)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def reference(batch, cache, *, window=None, cap=0.0, scale=DIM**-0.5, sinks=None):
    """Causal attention of every query token in float64, token by token: [T, Hq, D]."""
    out = torch.zeros(batch.query.shape, dtype=torch.float64)
    pages_of_a_token = [each.flatten(0, 1)[:, None] for each in (cache.keys, cache.values)]
    how = {"sm_scale": scale, "logit_cap": cap, "sinks": sinks}
    for row, length in enumerate(batch.lens.tolist()):
        places = batch.table[row, :, None] * batch.block_size + torch.arange(batch.block_size)
        begin, end = batch.starts[row : row + 2].tolist()
        for token in range(begin, end):
            after = length - (end - token) + 1
            seen = places.flatten()[: max(0, after)][-(window or length) :]
            if len(seen):
                query = batch.query[token : token + 1]
                given = (query, *pages_of_a_token, seen[None], torch.tensor([len(seen)]))
                out[token] = reference_attention(*given, **how)
    return out


def run(impl, batch, cache, metadata, rows=0, output=None, written=False):
    """One layer's forward; `rows` padding tokens follow the batch's tokens. `written`: a fused
    kernel has written keys and values, so the host passes none.
    """
    tokens = len(batch.query) + rows
    if output is None:
        output = torch.full((tokens, HEADS, DIM), 7.0)
    query = torch.cat([batch.query, torch.full((rows, HEADS, DIM), 7.0)]) if rows else batch.query
    key, value = torch.full((2, tokens, KV_HEADS, DIM), float("nan"))  # the cache has them
    if written:
        key = value = None
    found = impl.forward(None, query, key, value, cache.tensor, metadata, output)
    assert found is output
    return output


def forget_collectors():
    """Remove the plugin's registrations from the client's global registry."""
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, StateCollector):
            REGISTRY.unregister(collector)

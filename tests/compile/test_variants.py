"""The start compiles the variants that steps launch, under the keys that launches look up."""

import gc
import itertools
import threading
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from attention_checks import tree_attention
from deft_backend.compile import variants
from deft_backend.compile.variants import Variant, compile_all, compiling_for, recorded
from deft_backend.forest.token_tree import ancestors_of_links
from deft_backend.hosts.common.described_server import DescribedServer
from deft_backend.hosts.common.limits import planned_on_device
from deft_backend.hosts.common.warm_up import Drafts, LayerKind
from deft_backend.kernels import Gpu, configurations
from deft_backend.kernels.configurations import REDUCE_PARTIALS
from deft_backend.kernels.hopper import versions as gluon_versions
from deft_backend.kernels.launches import launches_of
from deft_backend.settings.config import Settings

HOPPER = Gpu.named("sm_90")
SIZES = (2, 3, 4, 7, 8, 16, 33, 34, 64, 65, 100, 160, 256, 257, 512, 1000, 1024, 1025, 2048)

needs_gluon = pytest.mark.skipif(
    not gluon_versions.available(), reason="kernels for another Triton"
)


def server(host, heads=(32, 8)):
    page_size = {"sglang": 1, "vllm": 16}[host]
    return DescribedServer(host, *heads, 128, torch.bfloat16, page_size, 2048)


def attention_of(described):
    names = ("num_query_heads", "num_kv_heads", "head_dim", "dtype", "page_size", "max_batch")
    same = {name: getattr(described, name) for name in (*names, "kv_dtype", "query_tokens")}
    return tree_attention(**same, compiled_for=HOPPER)


def step_of(attention, described, batch, width, tokens=1):
    """Tensors as a model hands them over: a view of the queries, keys and values together."""
    heads, kv_heads, dim = attention.num_query_heads, attention.num_kv_heads, attention.head_dim
    qkv = torch.empty((batch * tokens, (heads + 2 * kv_heads) * dim), dtype=attention.dtype)
    index = torch.int64 if described.host == "sglang" else torch.int32
    if described.host == "sglang":
        k_cache, v_cache = torch.zeros((2, 9, kv_heads, dim), dtype=attention.kv_dtype)
    else:
        cache = torch.zeros((9, 16, kv_heads, 2 * dim), dtype=attention.kv_dtype)
        k_cache, v_cache = cache[..., :dim], cache[..., dim:]
    return {
        "q": qkv[:, : heads * dim].view(batch * tokens, heads, dim),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": torch.empty((batch + 1, width), dtype=torch.int32),
        "seq_lens": torch.full((batch,), 5, dtype=index),
        "table_rows": torch.arange(batch, dtype=index),
    }


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SINKS = (LayerKind(), LayerKind(soft_cap=True), LayerKind(sinks=torch.bfloat16))
SERVED = {
    "sglang": {},
    "vllm": {},
    "sglang-chain": {"drafts": Drafts(5, always=True)},
    "sglang-long-chain": {"drafts": Drafts(40, always=True)},
    "sglang-tree": {"drafts": Drafts(8, trees=True, always=True)},
    "sglang-large-tree": {"drafts": Drafts(64, trees=True, always=True)},
    "vllm-chain": {"drafts": Drafts(5, ragged=True)},
    "vllm-long-chain": {"drafts": Drafts(40, ragged=True)},
    "sglang-e4m3": {"kv_dtype": E4M3},
    "sglang-e5m2-chain": {"drafts": Drafts(5, always=True), "kv_dtype": E5M2},
    "vllm-e4m3": {"kv_dtype": E4M3},
    "vllm-e5m2-chain": {"drafts": Drafts(5, ragged=True), "kv_dtype": E5M2},
    "sglang-sinks": {"layers": SINKS},
    "vllm-sinks": {"layers": SINKS[2:]},
    "vllm-all": {"drafts": Drafts(5, ragged=True), "kv_dtype": E4M3, "layers": SINKS},
    "sglang-all": {"drafts": Drafts(5, trees=True, always=True), "kv_dtype": E4M3, "layers": SINKS},
}
"""Servers by their host and what they have besides heads of one dtype."""


@pytest.fixture(params=[False, True], ids=["plain", "gluon"])
def gluon(request, monkeypatch):
    """Whether this Triton compiles the kernels in Gluon, which servers on Hopper launch."""
    caches = (configurations.kernel_configuration, launches_of)
    monkeypatch.setattr(gluon_versions, "available", lambda: request.param)
    for cached in caches:
        cached.cache_clear()
    yield request.param
    for cached in caches:
        cached.cache_clear()


OTHER_HEADS = [(heads, host) for heads in ((64, 8), (8, 8)) for host in ("sglang", "vllm")]


@needs_gluon
@pytest.mark.parametrize(
    ("heads", "name"), [*itertools.product([(32, 8), (8, 1)], SERVED), *OTHER_HEADS]
)
def test_exactly_what_steps_launch_is_compiled(heads, name, gluon):
    """Verifications, decode, caches of 8 bits, and layers with sinks or a soft cap."""
    described = replace(server(name.split("-")[0], heads), **SERVED[name])
    drafts = described.drafts
    compiled = set(described.variants(HOPPER, Settings()))
    held = planned_on_device(2048, described.query_tokens, heads[0] // heads[1])
    attention = attention_of(replace(described, max_batch=held))
    assert attention.max_batch == held
    launched = set()
    for width in (131072, 131076):
        for batch in sorted({size for size in SIZES if size < held} | {held}):
            with recorded() as found:
                if drafts is not None:
                    step(attention, described, batch, width, drafts)
                if drafts is None or not drafts.always:
                    step(attention, described, batch, width)
            launched |= set(found)
    assert {variant.name for variant in launched - compiled} == set()
    assert {variant.name for variant in compiled - launched} == set()
    names = {variant.name for variant in compiled}
    assert ("hopper_large_tile_attention" in names) is gluon


def step(attention, described, batch, width, drafts=None):
    """A step without drafts, or a verification, with what the adapters pass for it."""
    tokens = 1 if drafts is None else drafts.query_tokens
    given = step_of(attention, described, batch, width, tokens)
    if drafts is not None:
        given["seq_lens"] = given["seq_lens"] + tokens
        if drafts.trees:
            links = torch.full((2, batch + 2, tokens), -1)[:, :batch]
            given["ancestors"] = ancestors_of_links(*links)
        if drafts.ragged:
            given["query_start"] = torch.zeros(batch + 3, dtype=torch.int32)[: batch + 1]
    planned = [given["page_table"], given["seq_lens"]]
    rows, once = given["table_rows"], {} if drafts is None else {"query_tokens": tokens}
    attention.plan_batch(*planned, table_rows=rows, on_device=True, **once)
    given["out"] = torch.empty(given["q"].shape, dtype=attention.dtype)
    given |= {"static_launch": True} if drafts is None else {}
    if described.kv_dtype is not None:  # hosts pass its scales as tensors
        given |= {name: torch.ones(()) for name in ("k_scale", "v_scale")}
    for layer in described.layers:
        heads = attention.num_query_heads
        sinks = None if layer.sinks is None else torch.zeros(heads, dtype=layer.sinks)
        attention.run(**given, logit_cap=30.0 * layer.soft_cap, sinks=sinks)


@pytest.fixture
def keys():
    """Triton's keys of what it is asked to compile, and does not."""
    seen = []

    def hook(**event):
        seen.append((event["fn"].name, event["compile"]["specialization_data"]))
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    yield seen
    knobs.runtime.jit_cache_hook = before


@needs_gluon
@pytest.mark.parametrize("host", ["sglang", "vllm"])
def test_a_variant_has_the_key_of_its_launch(host, keys):
    described = server(host)
    attention = attention_of(described)
    step = step_of(attention, described, 40, 131076)
    launches = []

    with recorded() as found:
        recorder = variants.recorder

        def both(kernel, arguments, constants, options):
            recorder(kernel, arguments, constants, options)
            launches.append(partial(kernel.warmup, *arguments, grid=(1,), **constants, **options))

        variants.recorder = both  # until `recorded` ends
        attention.plan_batch(
            step["page_table"], step["seq_lens"], table_rows=step["table_rows"], on_device=True
        )
        attention.run(**step)
    with compiling_for(90):
        for launch in launches:
            launch()
        launched = list(keys)
        keys.clear()
        for variant in found:
            variant.compile()
    assert len(found) == len(launches) == 10
    assert keys == launched


def test_arguments_for_which_triton_compiles_alike_are_of_one_kind():
    """Integers of 32 bits or more, 1 and multiples of 16 apart unless they are fixed."""
    low, high, more = -(1 << 31), (1 << 31) - 1, 1 << 32
    kinds = {1: 1, 2: 2, 16: 16, -48: 16, low: 16, low - 1: more + 2, high: 2, high + 1: more + 16}
    assert {value: variants._kind(value, fixed=False) for value in kinds} == kinds
    fixed = {1: 2, 16: 2, low: 2, low - 1: more + 2, high: 2, high + 1: more + 2}
    assert {value: variants._kind(value, fixed=True) for value in fixed} == fixed
    structure = variants.Pointer(torch.int8, aligned=False), (0.25, 32)
    assert variants._kind(structure, fixed=True) == (structure[0], (0.5, 16))
    assert variants._kind(torch.zeros(9)[4:], fixed=True) == variants.Pointer(torch.float32, True)


@pytest.mark.parametrize(
    ("threads", "cpus", "count", "used"),
    [(None, 40, 50, 32), (None, 9, 50, 9), (40, 1, 50, 32), (3, 9, 2, 2), (3, 9, 0, 1)],
)
def test_how_many_threads_compile(threads, cpus, count, used, monkeypatch):
    monkeypatch.setattr(variants, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: "here"))
    kernel = SimpleNamespace(device_caches=defaultdict(list))
    assert variants._threads_for([SimpleNamespace(kernel=kernel)] * count, threads) == used
    assert list(kernel.device_caches) == ["here"] * bool(count)  # made before the threads start


def test_a_kernel_that_a_launch_compiles_is_said(caplog, monkeypatch):
    caplog.set_level("INFO")
    now, heard = itertools.count(1.0, 2.5), []
    monkeypatch.setattr(variants.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event))
    kernel, other = (SimpleNamespace(fn=SimpleNamespace(__name__=name)) for name in ("k", "other"))
    for compiled, hit in ((kernel, True), (other, False), (kernel, False)):
        with variants.reported_late(kernel):
            knobs.compilation.listener(src=SimpleNamespace(fn=compiled), cache_hit=hit)
    assert len(heard) == 3
    (said,) = caplog.messages
    assert said == "deft: compiled the kernel k at its first launch, in 7.5 s"


def reductions(count):
    """Variants that compile quickly."""
    found = {}
    for max_batch in (2, 200):
        described = replace(server("vllm"), max_batch=max_batch)
        found |= dict.fromkeys(described.variants(HOPPER, Settings()))
    return [variant for variant in found if variant.kernel is REDUCE_PARTIALS._compiled][:count]


@pytest.mark.parametrize("wrapped", ["no", "cause", "context"])
def test_a_compilation_is_repeated_if_python_stumbles(wrapped):
    """Triton wraps what its parser raises in a called function."""
    calls = []

    def stumble():
        calls.append(1)
        if len(calls) == 3:
            return "kernel"
        try:
            raise SystemError("AST constructor recursion depth mismatch")
        except SystemError as error:
            if wrapped == "no":
                raise
            if wrapped == "cause":
                raise CompilationError(None, None, None) from error
            raise CompilationError(None, None, None)  # noqa: B904

    assert variants._compiled(SimpleNamespace(compile=stumble)) == "kernel"
    assert len(calls) == 3

    def fail():
        calls.append(1)
        raise CompilationError(None, None, None)

    with pytest.raises(CompilationError):
        variants._compiled(SimpleNamespace(compile=fail))
    assert len(calls) == 4

    def stumble_always():
        calls.append(1)
        raise SystemError

    with pytest.raises(SystemError):
        variants._compiled(SimpleNamespace(compile=stumble_always))
    assert len(calls) == 4 + 21


def test_the_garbage_collector_rests_while_kernels_are_compiled():
    for enabled, choose in ((False, gc.disable), (True, gc.enable)):
        choose()
        with variants._no_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled


@pytest.mark.usefixtures("triton_cache")
def test_kernels_are_compiled_on_several_threads_and_found_again():
    wanted = reductions(2)
    prepared = []
    with compiling_for(90):
        listener = knobs.compilation.listener
        first = compile_all(wanted, threads=2, prepare=lambda: prepared.append(1))
        outer = driver.active
        with compiling_for(90):  # as another process would
            again = compile_all(wanted, threads=1)
        assert driver.active is outer
        assert knobs.compilation.listener is listener
    assert (first.compiled, first.cached, first.threads) == (2, 0, 2)
    assert (again.compiled, again.cached, again.threads) == (0, 2, 1)
    assert 1 <= len(prepared) <= 2
    assert [kernel.hash for kernel in first.kernels] == [kernel.hash for kernel in again.kernels]
    said = "2 kernels ready in 1.2 s: 2 compiled on 2 threads, 0 from the cache"
    assert str(replace(first, seconds=1.23)) == said


def test_threads_that_load_at_once_do_not_take_each_others_launcher(monkeypatch):
    """Triton 3.6 loads launchers into one module, which the last load has changed."""
    module, both = SimpleNamespace(), threading.Barrier(2)

    def launcher(src, metadata):
        module.launch = src
        if threading.current_thread() is not threading.main_thread():
            both.wait(10)
        return module.launch

    class Loaded:
        def __init__(self, src):
            self.src, self.metadata = src, None

        def __getitem__(self, grid):
            self._run = launcher(self.src, self.metadata)

    class Wanted:
        device_caches = dict.fromkeys([0])

        def __init__(self, name):
            self.kernel, self.compile = self, partial(Loaded, name)

    active = SimpleNamespace(get_current_device=lambda: 0, launcher_cls=launcher)
    monkeypatch.setattr(driver, "_active", active)
    wanted = [Wanted("stage 1"), Wanted("stage 2")]
    done = compile_all(wanted, threads=2, load=True)
    assert [kernel._run for kernel in done.kernels] == ["stage 1", "stage 2"]


@pytest.mark.usefixtures("triton_cache")
def test_kernels_are_compiled_while_others_run():
    """A failed compilation holds up no other, and its error reaches a caller that waits for it. At
    the end, waiting compilations are cancelled.
    """
    good = reductions(2)
    bad = Variant(good[0].kernel, good[0].arguments, good[0].constants, (("no_such_option", 1),))
    with compiling_for(90):
        with pytest.raises(KeyError, match="no_such_option"):
            compile_all([bad])
        prepared = []
        with variants.compiled_meanwhile([bad, *good], lambda: prepared.append(1)) as compiling:
            assert isinstance(compiling[bad].exception(60), KeyError)
            assert not wait([compiling[each] for each in good], 60).not_done
        assert prepared
        assert compile_all(good).cached == 2
        begun, go = threading.Event(), threading.Event()
        many = [Variant(good[0].kernel, (), (), (("number", n),)) for n in range(64)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Variant, "compile", lambda self: (begun.set(), go.wait(60)))
            with variants.compiled_meanwhile(many, lambda: None) as compiling:
                assert begun.wait(60)
                threading.Timer(0.1, go.set).start()
        assert any(each.cancelled() for each in compiling.values())

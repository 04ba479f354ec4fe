"""vLLM's mixed steps: decode rows through tree attention, the rest through the host."""

import dataclasses
import random
import weakref
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker import ubatch_utils
from vllm.v1.worker.worker_base import WorkerWrapperBase

import vllm_fakes as fakes
from attention_checks import repeated_layers
from deft_backend.attention import TreeAttention, layer_addresses
from deft_backend.hosts.common.limits import LayerShape
from deft_backend.hosts.vllm import factory, group
from deft_backend.hosts.vllm.cached_prefixes import NULL_BLOCK, CachedPrefixes
from deft_backend.hosts.vllm.layers import Layer
from deft_patches.vllm import observe_steps
from failure_lines import raising
from vllm_cpu_backend import PlainCpuBuilder

LENS = [40, 37, 33, 50, 5]
MIXED = [1, 1, 1, 30, 5]  # three decode, one ends its prompt, one begins


def mixed(query_lens=MIXED, layers=None, lens=LENS, **changes):
    """A mixed step of requests that share their first blocks."""
    kind = dataclasses.replace(fakes.KINDS["mixed"], lens=lens, query_lens=query_lens)
    return kind.step(layers or fakes.tree_layers(), changes=changes)


@pytest.mark.parametrize("seed", range(6))
def test_every_division_of_a_batch(seed, rests):
    """Any number of decode rows, with and without drafts, before prompts of any length."""
    draw = random.Random(seed)
    drafts = seed % 2
    decoding, prompts = draw.randint(2, 5), draw.randint(1, 3)
    lens = [draw.randint(40, 70) for _ in range(decoding + prompts)]
    queries = [draw.randint(1, 1 + 3 * drafts) for _ in range(decoding)]
    queries += [draw.randint(5, lens[decoding + at]) for at in range(prompts)]
    layers = fakes.tree_layers(
        fakes.make_config(speculative_config=fakes.speculating(3)) if drafts else None
    )
    prefilling = torch.tensor([False] * decoding + [True] * prompts)
    step = mixed(queries, layers, lens=lens, is_prefilling=prefilling)
    assert step.tree is not None
    step.check()
    assert rests == [sum(queries[decoding:])] * 2
    several = sum(queries[:decoding]) > decoding
    assert step.tree.query_tokens == (4 if several else 1)
    assert fakes.state().counters().verified_tokens == (sum(queries[:decoding]) if several else 0)


def test_the_whole_batchs_metadata_does_not_share_buffers_with_the_rests(monkeypatch):
    """A builder may keep buffers between builds: FLASH_ATTN's, which graphs read."""
    build = PlainCpuBuilder.build

    def into_buffers(self, common_prefix_len, common, **options):
        metadata = build(self, common_prefix_len, common, **options)
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(16, dtype=torch.int32)
        self.buffer[: len(metadata.seq_lens)] = metadata.seq_lens
        return dataclasses.replace(metadata, seq_lens=self.buffer[: len(metadata.seq_lens)])

    monkeypatch.setattr(PlainCpuBuilder, "build", into_buffers)
    step = mixed()
    assert step.metadata.seq_lens.tolist() == LENS
    assert step.tree.rest.seq_lens.tolist() == LENS[3:]
    step.check()


def test_a_rest_without_metadata_is_said_once(monkeypatch, caplog):
    """The host's function to slice a batch may refuse; then the host computes such steps alone."""
    monkeypatch.setattr(ubatch_utils, "_make_metadata_with_slice", raising(AssertionError("empty")))
    step = mixed()
    step.build()
    assert step.tree is None
    step.check()
    assert caplog.text.count("made no metadata for a part of a batch") == 1
    assert fakes.state().counters().total("mixed", tree=False).steps == 2


def test_a_worker_that_is_told_nothing_splits_nothing(monkeypatch, caplog):
    monkeypatch.setattr(factory, "untold", lambda config: "workers under Ray get other messages")
    layers = fakes.tree_layers()
    builder = layers.builder(fakes.make_spec())
    assert "steps with prefills are the host's alone: workers under Ray" in caplog.text
    assert builder.deft_rest is None
    batch = fakes.Batch(LENS, shared=2, query_lens=MIXED)
    step = fakes.Step(batch, layers, fakes.KINDS["mixed"].changes)
    assert step.tree is None
    step.check()


def test_decode_rows_come_first_in_model_runner_v1(monkeypatch):
    """V1 sorts for the smallest threshold that a builder names; FLASH_ATTN names none."""
    config = fakes.make_config(speculative_config=fakes.speculating(3))
    assert fakes.tree_layers(config).builder(fakes.make_spec()).reorder_batch_threshold == 4
    monkeypatch.setattr(PlainCpuBuilder, "reorder_batch_threshold", 1)
    assert fakes.tree_layers(config).builder(fakes.make_spec()).reorder_batch_threshold == 1
    monkeypatch.undo()
    windows = fakes.tree_layers(arguments={"sliding_window": 9}).builder(fakes.make_spec())
    assert windows.reorder_batch_threshold is None


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets a step's builder decide as on a GPU of 4 TB/s, for 32 layers of 4 KiB a token."""

    def decide(step, tokens):
        monkeypatch.setattr(CachedPrefixes, "shared_tokens", tokens)
        held, token = step.builder.deft_group, 2 * fakes.KV_HEADS * fakes.DIM * 4
        held.costs = SimpleNamespace(transfer_ms=lambda saved: saved / token * 4096 / 4e9)
        held.tree_layers = 32
        step.build()
        step.check()
        return step.tree is not None

    return decide


@pytest.mark.parametrize(
    ("name", "tokens", "ours"),
    [
        ("mixed", 100_000, False),
        ("mixed", 200_000, True),
        ("decode", 20_000, False),
        ("decode", 25_000, True),
        ("verification", 20_000, False),
    ],
)
def test_costs_decide_on_a_gpu(name, tokens, ours, on_gpu):
    """The saved reads against launches: of a plan, and in mixed steps of a part of each layer."""
    step = fakes.KINDS[name].step()
    assert on_gpu(step, tokens) == ours
    what = "a step with prefills whose other" if name == "mixed" else "an eager step whose"
    reasons = {} if ours else {f"{what} requests share too little": 1}
    assert fakes.state().counters().steps_host == reasons


@pytest.mark.parametrize("name", ["decode", "verification"])
def test_graphs_hold_tree_attention_whatever_requests_share(name, on_gpu):
    """A replay costs the CPU nothing. Steps of other sizes have no graph."""
    step = fakes.KINDS[name].step()
    assert not on_gpu(step, 0)
    step.capture()
    assert on_gpu(step, 0)
    of_fewer = step.batch.query_lens and step.batch.query_lens[:4]
    step.batch = fakes.Batch(step.batch.seq_lens[:4], shared=2, query_lens=of_fewer)
    assert not on_gpu(step, 0)


@pytest.mark.parametrize("setting", [{"DEFT_VERIFY": "1"}, {"DEFT_POLICY": "invariant"}])
def test_some_servers_decode_one_way_whatever_requests_share(setting, on_gpu, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert on_gpu(fakes.KINDS["decode"].step(), 0)


def test_a_worker_that_is_told_nothing_decodes_every_eager_step(on_gpu):
    step = fakes.KINDS["decode"].step()
    step.builder.deft_group.prefixes = None
    assert on_gpu(step, 0)


# Later layers of a step


@pytest.fixture
def repeated(monkeypatch):
    return repeated_layers(monkeypatch, group)


def repeating(layers=None):
    """A step whose layers have run once, so later passes may repeat launches."""
    step = mixed(layers=layers)
    step.tree.group.repeats.on = True
    step.check()
    return step


def test_later_layers_repeat_the_first(repeated):
    step = repeating(fakes.tree_layers(count=3))
    assert repeated == [38]  # a trial of the second layer; each layer has to run once
    repeated.clear()
    for _ in range(2):
        step.build()
        step.check()
        assert repeated == [38, 38]
        repeated.clear()
    assert fakes.state().counters().plans == 3
    step.check()  # the same metadata again: another pass, with another plan
    assert repeated == [38, 38]
    assert fakes.state().counters().plans == 4


def test_a_repeat_that_fails_is_a_kernel_that_fails(repeated, rests, monkeypatch, failures):
    step = repeating()
    step.build()
    step.run(0)
    rests.clear()
    monkeypatch.setattr(TreeAttention, "repeat", raising(RuntimeError("no launch")))
    fakes.close(step.run(1), fakes.reference(step.batch, step.cache))
    assert rests == [len(step.batch.query)]
    assert "a kernel failed (RuntimeError('no launch'))" in failures.pop()
    assert fakes.state().counters().steps_host == {"kernel failed": 1}


@pytest.mark.parametrize("change", ["cache", "scale", "failed"])
def test_a_layer_that_has_changed_is_not_repeated(change, repeated, failures):
    step = repeating()
    step.build()
    repeated.clear()
    options, group_of_step = {}, step.tree.group
    step.run(0)
    if change == "cache":
        step.cache.tensor = step.cache.tensor.clone()
    elif change == "scale":
        step.layers.impls[1].scale = options["scale"] = 0.7
    else:
        group_of_step.failure.kernel_failed(RuntimeError("planted"))
        failures.clear()
    fakes.close(step.run(1), fakes.reference(step.batch, step.cache, **options))
    assert not repeated
    step.build()
    if step.tree is not None:
        step.run(0)
        fakes.close(step.run(1), fakes.reference(step.batch, step.cache, **options))
        assert repeated == [38]


def test_a_layer_with_other_tensors_or_another_scale_is_not_the_held_one():
    cache, sinks, scales = torch.ones(3, 1, 16, 128), torch.ones(4), torch.ones(1)
    layer = Layer(LayerShape(4, 2, 64), 0.1, 0.0, None, cache="fp8", scales=(scales,) * 3)
    owner = SimpleNamespace(scale=0.1, sinks=sinks, deft_layer=layer)
    addresses = layer_addresses(cache[..., :64], cache[..., 64:], sm_scale=0.1, sinks=sinks)
    held = group.HeldLayer(weakref.ref(cache), layer, 0.1, sinks, addresses)
    assert held.holds(owner, cache)
    assert not held.holds(owner, cache.clone())
    for changes in (
        {"scale": 0.2},
        {"sinks": sinks.clone()},
        {"deft_layer": layer._replace(scales=(scales.clone(),) * 3)},
        {"deft_layer": layer._replace(reason="scales for each head")},
    ):
        assert not held.holds(SimpleNamespace(**{**vars(owner), **changes}), cache)
    for tensor in (sinks, cache):  # new weights, or new memory, in the same object
        before, tensor.data = tensor.data, tensor.data.clone()
        assert not held.holds(owner, cache)
        tensor.data = before
    assert held.holds(owner, cache)


def test_a_held_layer_does_not_keep_the_cache(repeated):
    """vLLM frees a first cache, of the captures that measure their memory, before the real one."""
    step = repeating()
    cache = weakref.ref(step.cache.tensor)
    del step.cache.tensor
    assert cache() is None


# What requests share, by the scheduler's messages


class Scheduler:
    """Random traffic, and what a worker should know after each message.

    A request computes its prompt in chunks and then decodes. It may be preempted, and begins again
    with other blocks; not every version names it before. Another group of caches has a window.
    """

    def __init__(self, draw, query_tokens):
        self.draw, self.query_tokens = draw, query_tokens
        self.blocks = {}  # of each request that runs
        self.chunks = {}  # of its prompt that are left
        self.shared = {}  # its blocks when it began to decode
        self.preempted, self.names, self.free = [], map(str, count()), count(1000)
        self.groups = draw.randrange(3)

    def of_groups(self, blocks):
        window = [NULL_BLOCK] * (len(blocks) + 1)
        return [(blocks,), (blocks, window), (window, blocks)][self.groups]

    def begin(self, name):
        prefix, own = range(1, self.draw.randint(1, 9)), self.draw.randint(0, 2)
        self.blocks[name] = [*prefix, *(next(self.free) for _ in range(own))]
        self.chunks[name] = self.draw.randint(0, 2)
        return self.of_groups([*self.blocks[name]])

    def end(self, chance):
        """Requests that run no longer."""
        ended = [name for name in self.blocks if self.draw.random() < chance]
        for name in ended:
            del self.blocks[name], self.chunks[name]
            self.shared.pop(name, None)
        return ended

    def grow(self, name):
        # Later chunks of prompts are also shared.
        new = 100 + len(self.blocks[name]) if self.chunks[name] else next(self.free)
        block = [new] * (self.draw.random() < 0.5)
        self.blocks[name] += block
        return self.of_groups(block) if block else None

    def message(self, ends=0.1, arrivals=2):
        finished, preempted = self.end(ends), self.end(ends)
        more = {name: self.grow(name) for name in self.blocks}
        resumed, self.preempted = self.preempted, [*preempted]
        if self.draw.random() < 0.3:  # preempted and resumed without a word
            resumed, self.preempted, preempted = resumed + preempted, [], None
        more |= {name: self.begin(name) for name in resumed}
        more["began before"] = self.of_groups([1])
        new = {next(self.names): None for _ in range(self.draw.randint(0, arrivals))}
        first = [SimpleNamespace(req_id=name, block_ids=self.begin(name)) for name in new]
        tokens = {name: self.tokens(name) for name in self.blocks if self.draw.random() < 0.9}
        later = {"req_ids": [*more], "resumed_req_ids": {*resumed}}
        return SimpleNamespace(
            scheduled_new_reqs=first,
            scheduled_cached_reqs=SimpleNamespace(**later, new_block_ids=[*more.values()]),
            num_scheduled_tokens=tokens,
            finished_req_ids=set(finished),
            preempted_req_ids=preempted,
        )

    def tokens(self, name):
        if self.chunks[name]:
            self.chunks[name] -= 1
            return self.draw.randint(self.query_tokens + 1, 30)
        self.shared.setdefault(name, [*self.blocks[name]])
        return self.draw.randint(1, self.query_tokens)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_count_from_the_first_decode_of_their_request(seed, keeps):
    draw, query_tokens = random.Random(seed), 1 + 3 * (seed % 2)
    scheduler, prefixes = Scheduler(draw, query_tokens), CachedPrefixes(16, query_tokens)
    prefixes.keeps_generated = keeps
    most = 0
    for _ in range(100):
        prefixes.observe(scheduler.message())
        shared = [block for blocks in scheduler.shared.values() for block in blocks]
        assert prefixes.shared_tokens == 16 * (len(shared) - len(set(shared)))
        most = max(most, prefixes.shared_tokens)
        assert keeps or prefixes._later.keys() <= prefixes._prompts  # nobody asks for others
        for name in scheduler.blocks if keeps and draw.random() < 0.3 else ():
            assert prefixes.blocks_of(name).tolist() == scheduler.blocks[name]
        assert all(prefixes.blocks_of(name) is None for name in scheduler.preempted)
    assert most
    for _ in range(2):  # the second message ends what the first one resumes
        prefixes.observe(scheduler.message(ends=1.0, arrivals=0))
    assert not prefixes._holders.any()
    left = prefixes._blocks, prefixes._decoding, prefixes._later, prefixes._prompts
    assert not any(left)


# The patch that shows messages to observers


def test_a_worker_shows_its_steps(monkeypatch, caplog):
    monkeypatch.setattr(WorkerWrapperBase, "execute_model", WorkerWrapperBase.execute_model)
    monkeypatch.setattr(observe_steps, "_observers", [])
    worker = object.__new__(WorkerWrapperBase)
    worker._apply_mm_cache = lambda step: None
    seen = []

    def execute_model(step):
        seen.append(f"step {step}")
        return f"result of {step}"

    worker.worker = SimpleNamespace(execute_model=execute_model)

    def last(step):
        observe_steps.remove(last)
        raise ValueError("by itself")

    for observer in (raising(ValueError("too many")), last, seen.append):
        observe_steps.install(observer)
    assert [worker.execute_model(step) for step in ("a", "b")] == ["result of a", "result of b"]
    assert seen == ["a", "step a", "b", "step b"]  # the step needs what the observer found
    assert [caplog.text.count(error) for error in ("too many", "by itself")] == [1, 1]

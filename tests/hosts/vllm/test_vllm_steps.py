"""Steps of every kind: decode, verification, and those that also prefill, split or picked from."""

import copy
import random
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm_fakes as fakes
from deft_backend.attention import TreeAttention
from deft_backend.hosts.vllm import server
from deft_backend.hosts.vllm.content import DOCUMENTS, build_rest, content_of, unsplit
from deft_backend.hosts.vllm.layers import drafts
from deft_backend.hosts.vllm.step import step_of
from deft_backend.telemetry.counters import MIXED, Content, Counters, Steps
from deft_patches.vllm import observe_steps
from drawings import check_asked
from failure_lines import raising
from vllm_cpu_backend import PlainCpuBackend, PlainCpuBuilder, PlainCpuImplementation

VERIFICATION = fakes.KINDS["verification"]
TOKEN = 2 * 2 * fakes.KV_HEADS * fakes.DIM * 4  # bytes: layers, keys and values


def steps_of(kind, reason=None):
    return {Content(kind.name, reason): Steps(1, kind.rows, kind.tokens * TOKEN)}


def test_decode_rows_go_through_tree_attention_and_the_rest_through_the_host(kind, rests):
    step = kind.step()
    assert step.tree.query_tokens == 1 + kind.drafts
    step.check()
    assert rests == [kind.rest] * 2 * bool(kind.rest)
    counted = fakes.state().counters()
    assert counted.steps == steps_of(kind)
    assert counted.plans == 1
    assert counted.verified_tokens == (sum(kind.query_lens) if kind.drafts else 0)
    assert counted.kv_bytes_query_guided == kind.tokens * TOKEN
    # The prefixes are shorter than a chunk of the policy `invariant`.
    assert (counted.kv_bytes_read < counted.kv_bytes_query_guided) != kind.invariant
    drafting = step.builder.build_for_drafting(step.batch.common(**step.changes), 0)
    assert step_of(drafting) is None


def test_padding_tokens_behind_the_batch_stay_as_they_are(kind):
    step = kind.step()
    found = step.run(rows=3)
    fakes.close(found[:-3], fakes.reference(step.batch, step.cache))
    assert found[-3:].eq(7.0).all()
    # A fused kernel has written keys and values.
    fakes.close(step.run(written=True), fakes.reference(step.batch, step.cache))


@pytest.mark.parametrize(
    ("name", "query_lens", "changes", "reason"),
    [
        ("decode", None, {"prefix": 32}, "cascade attention"),
        ("decode", None, {"causal": False}, "attention that is not causal"),
        ("decode", None, {"num_actual_tokens": 6}, "query tokens of no request"),
        ("mixed", [1, 1, 30, 1, 5], {"is_prefilling": None}, "decode rows behind prefills"),
        ("mixed", None, {"mm_req_doc_ranges": {3: [(20, 30)]}}, DOCUMENTS),
        ("mixed", None, {"causal": False}, "attention that is not causal"),
        ("mixed", [1, 30, 5, 30, 5], {"prefix": 32}, "batch smaller than DEFT_MIN_BATCH=2"),
    ],
)
def test_steps_of_another_kind_are_counted(name, query_lens, changes, reason, monkeypatch):
    kind = replace(fakes.KINDS[name], query_lens=query_lens or fakes.KINDS[name].query_lens)
    step, changes = kind.step(), {**kind.changes, **changes}
    before = fakes.state().counters()
    monkeypatch.setattr(PlainCpuBuilder, "build", lambda *args, **kwargs: SimpleNamespace())
    metadata = step.builder.build(changes.pop("prefix", 0), step.batch.common(**changes))
    assert step_of(metadata) is None
    counted = fakes.state().counters() - before
    ((content, steps),) = counted.steps.items()
    assert (content, steps.steps) == (Content(name, reason), 1)
    assert counted.kv_bytes_read == counted.kv_bytes_query_guided > 0


def test_sinks_and_soft_caps_are_the_layers_own(kind):
    sinks = torch.tensor([2.0, -1.0, 5.0, 0.5])
    step = kind.step(kind.layers(arguments={"sinks": sinks, "logits_soft_cap": 2.0}))
    assert step.tree is not None
    found = step.check(sinks=sinks, cap=2.0)
    for one in ({"sinks": sinks}, {"cap": 2.0}):
        assert not torch.allclose(
            found.double(), fakes.reference(step.batch, step.cache, **one), atol=1e-2
        )


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_a_cache_of_eight_bits(kind, cache):
    """A layer holds one scale for all keys, and one for all values."""
    step = kind.step(kind.layers(arguments={"kv_cache_dtype": cache}), dtype=torch.uint8)
    step.check_quantised(cache)
    assert (
        fakes.state().counters().total(tree=True).steps,
        fakes.state().counters().steps_host,
    ) == (1, {})
    step.metadata.deft_step = None
    step.cache = fakes.Cache(step.batch.pages, step.batch.block_size)
    step.check_quantised(cache)  # the host's own


@pytest.mark.parametrize("failing", ["plan_batch", "run"])
def test_after_a_failure_the_host_computes_all_of_the_step(
    kind, failing, monkeypatch, failures, rests
):
    """The first layer may have run. A launch that failed would fail again: no later step tries."""
    step = kind.step()
    expected = fakes.reference(step.batch, step.cache)
    if failing == "run":
        fakes.close(step.run(0), expected)
        rests.clear()
    monkeypatch.setattr(TreeAttention, failing, raising(RuntimeError("no such instruction")))
    fakes.close(step.run(1), expected)
    assert rests == [len(step.batch.query)]
    (line,) = failures
    assert "no such instruction" in line
    failures.clear()
    reason = {"run": "kernel failed", "plan_batch": "planning failed"}[failing]
    assert fakes.state().counters().steps == steps_of(kind, reason)
    assert fakes.state().counters().verified_tokens == 0
    step.build()
    assert step.tree is None
    step.check()
    assert fakes.state().counters().total(kind.name, tree=False).steps == 2


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_verified_results_show_a_wrong_kernel(kind, size, monkeypatch, failures):
    """The tolerance is relative to the largest value, whatever it is."""
    monkeypatch.setenv("DEFT_VERIFY", "1")
    step = kind.step()
    step.cache.tensor *= size
    step.check()
    assert not failures
    attention_run = TreeAttention.run

    def wrong(self, *args, **kwargs):
        out = attention_run(self, *args, **kwargs)
        out[2, 1, 3] += 0.01 * size
        return out

    monkeypatch.setattr(TreeAttention, "run", wrong)
    step.build()
    step.check()
    (line,) = failures
    assert "of tree attention and of the host's kernel differ by" in line
    failures.clear()
    step.build()
    assert step.tree is None


@pytest.mark.parametrize("slices", [True, False])
def test_another_group_with_the_same_requests(kind, slices, rests, monkeypatch):
    """Model runner V1 copies a group's metadata for another group, which may slice no batch. The
    second group shares nothing: the first one's plan would read other requests' tokens.
    """

    def update(self, metadata, blk_table, slot_mapping):  # as FLASH_ATTN does
        copied = copy.copy(metadata)
        copied.block_table = blk_table
        return copied

    monkeypatch.setattr(PlainCpuBuilder, "update_block_table", update, raising=False)
    config = kind.config()
    groups = [kind.layers(config, prefix=name) for name in ("first", "second")]
    builders = [layers.builder(fakes.make_spec()) for layers in groups]
    batches = [kind.batch(), kind.batch(shared=0, first_page=3)]
    batches[1].query = batches[0].query
    fakes.told(batches[0])
    cache = fakes.Cache(max(batch.pages for batch in batches), 16)
    metadata = builders[0].build(0, batches[0].common(**kind.changes))
    if not slices:
        builders[1].deft_rest = None
    slots = torch.full((len(batches[0].query),), -1)
    updated = builders[1].update_block_table(metadata, batches[1].table, slots)
    taken = slices or kind.name != "mixed" or kind.invariant
    assert (step_of(updated) is not None) == taken
    assert not taken or step_of(updated).group is builders[1].deft_group
    for index in range(2):  # the groups' layers take turns
        for layers, batch, held in zip(groups, batches, (metadata, updated), strict=True):
            fakes.close(
                fakes.run(layers.impls[index], batch, cache, held), fakes.reference(batch, cache)
            )
    assert fakes.state().counters().plans == 1  # the first group counts
    rest = [kind.rest] * bool(kind.rest)
    assert rests == (rest + (rest if taken else [len(batches[0].query)])) * 2


LENS = fakes.KINDS["mixed"].lens


def test_the_content_of_a_batch_and_its_division():
    """By the requests' query tokens, and what else the host says about their batch."""

    def answer(queries, *words):
        said = dict(word.partition("=")[::2] for word in words)
        prompts = [*map(int, filter(None, said.get("prompts", "").split(",")))]
        changes = {"is_prefilling": torch.tensor([row in prompts for row in range(5)])}
        if "unsaid" in said:  # which rows prompts have
            changes["is_prefilling"] = None
        if "unbounded" in said:  # by the CPU: how long contexts are
            changes["seq_lens_cpu_upper_bound"] = None
        if "on_device" in said:  # are the lengths alone
            changes["seq_lens"] = torch.zeros(5, device="meta")
        if "tokens" in said:
            changes["num_actual_tokens"] = int(said["tokens"])
        if "documents" in said:
            changes["mm_req_doc_ranges"] = {3: literal_eval(said["documents"])}
        batch = fakes.Batch(LENS, shared=2, query_lens=[*map(int, queries.split(","))])
        common = batch.common(**changes)
        found = content_of(common, int(said.get("most", 1)), equal_bits="equal_bits" in said)
        if found is None:
            return ["no decode"]
        of, rows = found.decoded, found.decoding
        verifies = ", verifies" if found.verifies else ""
        decoding = "" if rows is None else f" of requests {rows.tolist()}"
        return [
            f"{found.kind}: {found.requests} requests of {found.tokens} tokens{verifies}",
            f"{of.kind}: {of.rows} rows{decoding} on {of.tokens} tokens, {of.verified} verified",
            *([f"not split: {unsplit(found, common)}"] if found.kind == MIXED else []),
        ]

    check_asked(Path(__file__).with_name("batches.txt"), answer)


@pytest.mark.parametrize("workspace", [False, True])
def test_the_rest_of_a_batch_gets_a_builder_of_its_own(workspace):
    """FlashInfer's builders share one workspace."""

    class Builder:
        def __init__(self, *given):
            self.calls, self.max_cudagraph_size = [given], 512
            if workspace:
                self.set_workspace_buffer = lambda buffer: self.calls.append(buffer)

        def build(self, prefix, rest, **options):
            assert rest.num_actual_tokens > self.max_cudagraph_size  # no graph holds it
            self.calls.append((prefix, options))
            return rest

    first = SimpleNamespace(_get_workspace_buffer=lambda: "the workspace")
    builder = Builder("a", "b")
    builder.max_cudagraph_size = 0
    for prefilling in (None, torch.tensor([False] * 3 + [True] * 2)):
        batch = fakes.Batch(LENS, shared=2, query_lens=[1, 1, 1, 30, 5])
        common = batch.common(is_prefilling=prefilling)
        rest = build_rest(builder, first, content_of(common, 1), common, fast_build=True)
        assert (rest.num_reqs, rest.num_actual_tokens, rest.max_query_len) == (2, 35, 30)
        assert rest.query_start_loc.tolist() == [0, 30, 35]
        assert rest.seq_lens.tolist() == [50, 5]
        assert prefilling is None or rest.is_prefilling.tolist() == [True, True]
    told = [*(["the workspace"] * workspace), (0, {"fast_build": True})]
    assert builder.calls == [("a", "b"), *told * 2]


# Verification of draft chains


def test_a_server_counts_from_its_first_request(monkeypatch):
    """vLLM warms up with verifications like those of requests, before it captures graphs."""
    monkeypatch.setattr(server, "untold", lambda config: None)
    step = VERIFICATION.step()
    step.check()
    assert replace(fakes.state().counters(), compile_seconds=0.0) == Counters()
    observe = server._current.observe
    assert observe in observe_steps._observers
    assert server._current.prefixes.observe in observe_steps._observers
    observe(None)
    assert observe not in observe_steps._observers
    for _ in range(2):
        step.build()
        step.check()
    found = fakes.state().counters()
    assert (found.steps_tree, found.plans, found.verified_tokens) == (2, 2, 26)
    assert (
        found.kv_bytes_query_guided
        == 2 * VERIFICATION.tokens * fakes.state().token_bytes * fakes.state().num_layers
    )


def test_the_same_metadata_serves_another_batch_of_a_graph():
    """A replay fills the host's tensors anew: other lengths, fewer requests, fewer tokens."""
    step = replace(VERIFICATION, query_lens=[5] * 5).step()
    counted, batch = fakes.state().counters().verified_tokens, step.batch
    step.metadata = step.builder.build_for_cudagraph_capture(batch.common())
    other = fakes.Batch([35, 38, 41], shared=2, padding=2, query_lens=[5, 5, 5, 0, 0])
    batch.table[:, : other.table.shape[1]] = other.table
    batch.lens.copy_(other.lens)
    batch.starts.copy_(other.starts)
    fakes.close(step.run()[:15], fakes.reference(batch, step.cache)[:15])
    assert fakes.state().counters().verified_tokens == counted == 25  # a capture is no step


@pytest.mark.parametrize("prefilling", [None, torch.tensor([False, False, True, False, False])])
def test_documents_of_prompts_are_the_hosts(prefilling):
    """Their tokens attend to later ones. Once the prompts are computed, they do not matter."""
    changes = {"is_prefilling": prefilling, "mm_req_doc_ranges": {1: [(0, 3)], 2: []}}
    step = replace(VERIFICATION, query_lens=[5, 1, 5, 1, 5]).step(shared=0, changes=changes)
    assert step.tree is None
    step.check()
    counters = fakes.state().counters()
    assert counters.verified_tokens == counters.steps_tree == 0
    assert counters.total("verification").steps == 1
    one_each = replace(VERIFICATION, query_lens=[1] * 5).batch().common(**changes)
    assert step_of(step.builder.build(0, one_each)) is not None
    decoding = step.batch.common(mm_req_doc_ranges={1: [(0, 3)]})
    assert step_of(step.builder.build(0, decoding)) is not None


def test_the_draft_models_layers_are_the_hosts(caplog):
    layers = VERIFICATION.layers()
    draft = fakes.Layers(layers.backend, layers.config, count=1, prefix="draft_model.model.layers")
    caplog.set_level("INFO", "deft_backend")
    builder = draft.builder(fakes.make_spec())
    assert builder.deft_group is None
    assert "the draft model gets no tree attention" in caplog.text
    batch = fakes.Batch(VERIFICATION.lens, shared=2)
    assert step_of(builder.build(0, batch.common())) is None
    target = layers.builder(fakes.make_spec())
    metadata = target.build(0, batch.common())
    assert fakes.state().num_layers == layers.count
    # A draft's first pass may get the metadata of the target's step.
    cache = fakes.Cache(batch.pages, 16)
    fakes.close(fakes.run(draft.impls[0], batch, cache, metadata), fakes.reference(batch, cache))
    assert fakes.state().counters().plans == 0
    fakes.close(fakes.run(layers.impls[0], batch, cache, metadata), fakes.reference(batch, cache))
    assert fakes.state().counters().plans == fakes.state().counters().steps_tree == 1


def test_a_layer_that_the_host_marks_is_the_draft_models():
    """Beside a target with images, a draft's layers may count from 0, with no prefix.

    Their builder may get a copy of the server's configuration; it must not replace the server.
    """
    layers = VERIFICATION.layers()
    group = layers.builder(fakes.make_spec()).deft_group
    draft = fakes.Layers(layers.backend, layers.config, count=1, prefix="draft.layers")
    layers.config.compilation_config.static_forward_context["draft.layers.0"].is_draft_layer = True
    draft.config = copy.copy(layers.config)
    assert draft.builder(fakes.make_spec()).deft_group is None
    assert layers.builder(fakes.make_spec()).deft_group is group
    assert fakes.state().num_layers == layers.count


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.self_attn.attn", False),
        ("model.layers.2.self_attn.attn", True),
        ("model.layers.3.self_attn.attn", True),
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.mtp_layers.0.self_attn.attn", True),
        ("eagle.layers.0.attn", True),
        ("encoder.attn", False),
    ],
)
def test_draft_layers_are_known_by_their_names(name, expected):
    """The target has two layers."""
    assert drafts(name, fakes.make_config(speculative_config=fakes.speculating(2))) is expected
    assert not drafts(name, fakes.make_config())
    unknown = fakes.make_config(speculative_config=fakes.speculating(2))
    unknown.model_config.hf_text_config = SimpleNamespace()  # not how many layers the target has
    assert drafts(name, unknown) is (expected and not name.startswith("model.layers"))


# vLLM's batch-invariant mode: a request's bits do not depend on the other requests


@pytest.fixture
def mode(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def step_of_requests(lens, query_lens, prefilling, shared=2, **changes):
    kind = replace(fakes.KINDS["picked"], lens=lens, query_lens=query_lens, prefilling=prefilling)
    return kind.step(shared=shared, changes=changes)


def alone(step, row, query):
    """The output of one request of a step in a step of its own, which decodes one token."""
    batch = fakes.Batch([int(step.batch.lens[row])], shared=0)
    batch.table, batch.query = step.batch.table[row : row + 1], query
    metadata = step.builder.build(0, batch.common())
    return fakes.run(step.layers.impls[0], batch, step.cache, metadata)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("mode")
def test_bits_of_a_request_are_those_of_the_request_alone(seed, rests):
    """Any order of requests that decode, that end a prompt by one token, and of longer prompts."""
    draw = random.Random(seed)
    kinds = [draw.choice(["decode", "decode", "end", "prompt"]) for _ in range(7)] + ["decode"]
    draw.shuffle(kinds)
    lens = [draw.randint(40, 700) for _ in kinds]
    queries = [draw.randint(2, 30) if kind == "prompt" else 1 for kind in kinds]
    step = step_of_requests(lens, queries, [kind != "decode" for kind in kinds])
    found, hosts = step.run(), [*rests]
    decodes = [row for row, kind in enumerate(kinds) if kind == "decode"]
    in_front = decodes == list(range(len(decodes)))
    others = len(found) - (len(decodes) if in_front else 0)
    assert hosts == ([others] if len(decodes) < len(kinds) else [])
    own = torch.full(found.shape, 7.0)
    kv = torch.full((2, len(found), fakes.KV_HEADS, fakes.DIM), float("nan"))
    host = PlainCpuBackend.get_builder_cls().build(step.builder, 0, step.batch.common())
    PlainCpuImplementation.forward(
        step.layers.impls[0], None, step.batch.query, *kv, step.cache.tensor, host, own
    )
    for row, kind in enumerate(kinds):
        rows = slice(int(step.batch.starts[row]), int(step.batch.starts[row + 1]))
        expected = own[rows] if kind != "decode" else alone(step, row, step.batch.query[rows])
        assert torch.equal(found[rows], expected)
    torch.testing.assert_close(
        found.double(), fakes.reference(step.batch, step.cache), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(
    "changes", [{"mm_req_doc_ranges": {3: [(20, 30)]}}, {"seq_lens_cpu_upper_bound": None}]
)
@pytest.mark.usefixtures("mode")
def test_requests_decode_by_tree_attention_where_the_host_slices_no_batch(changes, rests):
    step = step_of_requests([40, 37, 33, 50], [1, 1, 1, 20], [False] * 3 + [True], **changes)
    assert step.tree.picked.requests.tolist() == [0, 1, 2]
    step.check()
    assert rests == [23, 23]


@pytest.mark.usefixtures("mode")
def test_neither_size_nor_sharing_leaves_a_step_to_the_host(monkeypatch):
    monkeypatch.setenv("DEFT_MIN_BATCH", "4")
    for shared in (0, 2):
        step = step_of_requests([40, 33], [1, 9], [False, True], shared=shared)
        assert step.tree.tokens == 1
        step.check()
    assert step.tree.group.attention.policy.name == "invariant"


def test_tables_may_be_wider_than_the_longest_request():
    """Models with an encoder have room for its tokens in each table; plans have none."""
    batch = fakes.Batch([20, 30, 40], shared=1)
    batch.table = torch.nn.functional.pad(batch.table, (0, 4096))
    step = fakes.Step(batch)
    step.check()
    assert step.tree.page_table.shape[1] == fakes.make_config().model_config.max_model_len // 16

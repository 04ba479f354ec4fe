"""Steps of every kind: decode, verification, and those that also prefill, split or picked from."""

from types import SimpleNamespace

import pytest
import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.vllm.content import DOCUMENTS, Content, RestBuilder, content_of, unsplit
from deft_backend.hosts.vllm.step import attach, step_of
from deft_backend.telemetry import counters
from deft_backend.telemetry.counters import DECODE, MIXED, VERIFICATION, Decoded, Steps
from failure_lines import raising
from vllm_fakes import DIM, KV_HEADS, Batch, Cache, close, make_spec, reference, run, state, told

TOKEN = 2 * 2 * KV_HEADS * DIM * 4  # bytes: layers, keys and values


def steps_of(kind, reason=None):
    return {counters.Content(kind.name, reason): Steps(1, kind.rows, kind.tokens * TOKEN)}


def test_decode_rows_go_through_tree_attention_and_the_rest_through_the_host(kind, rests):
    step = kind.step()
    assert step.tree.query_tokens == 1 + kind.drafts
    step.check()
    assert rests == [kind.rest] * 2 * bool(kind.rest)
    counted = state().counters()
    assert counted.steps == steps_of(kind)
    assert counted.plans == 1
    assert counted.verified_tokens == (sum(kind.query_lens) if kind.drafts else 0)
    assert counted.kv_bytes_query_guided == kind.tokens * TOKEN
    # The prefixes are shorter than a chunk of the policy `invariant`.
    assert (counted.kv_bytes_read < counted.kv_bytes_query_guided) != kind.invariant


def test_sinks_and_soft_caps_are_the_layers_own(kind):
    sinks = torch.tensor([2.0, -1.0, 5.0, 0.5])
    step = kind.step(kind.layers(arguments={"sinks": sinks, "logits_soft_cap": 2.0}))
    assert step.tree is not None
    found = step.check(sinks=sinks, cap=2.0)
    for one in ({"sinks": sinks}, {"cap": 2.0}):
        assert not torch.allclose(
            found.double(), reference(step.batch, step.cache, **one), atol=1e-2
        )


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_a_cache_of_eight_bits(kind, cache):
    """A layer holds one scale for all keys, and one for all values."""
    step = kind.step(kind.layers(arguments={"kv_cache_dtype": cache}), dtype=torch.uint8)
    step.check_quantised(cache)
    assert (state().counters().total(tree=True).steps, state().counters().steps_host) == (1, {})
    attach(step.metadata, None)
    step.cache = Cache(step.batch.pages, step.batch.block_size)
    step.check_quantised(cache)  # the host's own


@pytest.mark.parametrize("failing", ["plan_batch", "run"])
def test_after_a_failure_the_host_computes_all_of_the_step(
    kind, failing, monkeypatch, failures, rests
):
    """The first layer may have run. A launch that failed would fail again: no later step tries."""
    step = kind.step()
    expected = reference(step.batch, step.cache)
    if failing == "run":
        close(step.run(0), expected)
        rests.clear()
    monkeypatch.setattr(TreeAttention, failing, raising(RuntimeError("no such instruction")))
    close(step.run(1), expected)
    assert rests == [len(step.batch.query)]
    (line,) = failures
    assert "no such instruction" in line
    failures.clear()
    reason = {"run": "kernel failed", "plan_batch": "planning failed"}[failing]
    assert state().counters().steps == steps_of(kind, reason)
    assert state().counters().verified_tokens == 0
    step.build()
    assert step.tree is None
    step.check()
    assert state().counters().total(kind.name, tree=False).steps == 2


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
@pytest.mark.usefixtures("copied_metadata")
def test_another_group_with_the_same_requests(kind, slices, rests):
    """Model runner V1 copies a group's metadata for another group, which may slice no batch."""
    config = kind.config()
    groups = [kind.layers(config, prefix=name) for name in ("first", "second")]
    builders = [layers.builder(make_spec()) for layers in groups]
    batches = [kind.batch(), kind.batch(shared=0, first_page=3)]
    batches[1].query = batches[0].query
    told(batches[0])
    cache = Cache(max(batch.pages for batch in batches), 16)
    metadata = builders[0].build(0, batches[0].common(**kind.changes))
    if not slices:
        builders[1].deft_rest = None
    slots = torch.full((len(batches[0].query),), -1)
    updated = builders[1].update_block_table(metadata, batches[1].table, slots)
    taken = slices or kind.name != "mixed" or kind.invariant
    assert (step_of(updated) is not None) == taken
    assert not taken or step_of(updated).group is builders[1].deft_group
    for layers, batch, held in zip(groups, batches, (metadata, updated), strict=True):
        close(run(layers.impls[0], batch, cache, held), reference(batch, cache))
    whole = len(batches[0].query)
    assert rests == ([kind.rest] * bool(kind.rest)) + (
        [kind.rest] * bool(kind.rest) if taken else [whole]
    )


# The content of a batch: requests of these contexts, by their query tokens.

LENS = [40, 37, 33, 50, 5]
PREFILLS = {at: [row in at for row in range(5)] for at in [(), (1,), (3, 4), (1, 3, 4), (0, 1, 2)]}
META = {"seq_lens": torch.zeros(5, device="meta"), "seq_lens_cpu_upper_bound": None}


@pytest.mark.parametrize(
    ("queries", "prefills", "query_tokens", "equal_bits", "expected"),
    [
        ([1] * 5, (), 1, False, (DECODE, 5, 5, 5, 165, 0)),
        ([1] * 5, (1,), 1, False, (DECODE, 5, 5, 5, 165, 0)),
        ([1] * 5, (), 1, True, (DECODE, 5, 5, 5, 165, 0)),
        ([1] * 5, (1,), 1, True, (MIXED, 4, 4, 4, 128, 0, True, [0, 2, 3, 4])),
        ([1, 1, 0, 0, 0], (), 1, False, (DECODE, 5, 2, 2, 165, 0)),
        ([1, 2, 1, 1, 1], (), 2, False, (VERIFICATION, 5, 6, 5, 165, 6)),
        ([1, 2, 1, 1, 1], (), 1, False, (MIXED, 1, 1, 4, 128, 0, True, [0, 2, 3, 4])),
        ([1, 1, 1, 30, 5], (), 1, False, (MIXED, 3, 3, 3, 110, 0, False, [0, 1, 2])),
        ([1, 1, 1, 30, 5], (1, 3, 4), 1, False, (MIXED, 3, 3, 2, 73, 0, False, [0, 2])),
        ([1, 1, 1, 30, 5], (1, 3, 4), 1, True, (MIXED, 2, 2, 2, 73, 0, True, [0, 2])),
        ([1, 1, 1, 30, 5], (3, 4), 1, True, (MIXED, 3, 3, 3, 110, 0, False, [0, 1, 2])),
        ([5, 2, 1, 30, 5], (3, 4), 5, False, (MIXED, 3, 8, 3, 110, 8, False, [0, 1, 2])),
        ([30, 2, 9, 1, 1], (0, 1, 2), 1, False, (MIXED, 0, 0, 2, 55, 0, True, [3, 4])),
        ([5, 20, 9, 30, 5], (), 1, False, None),
        ([0] * 5, (), 1, False, None),
    ],
)
def test_the_content_of_a_batch(queries, prefills, query_tokens, equal_bits, expected):
    batch, changes = Batch(LENS, shared=2, query_lens=queries), {}
    for known in ({"is_prefilling": torch.tensor(PREFILLS[prefills])}, META):
        changes |= known
        found = content_of(batch.common(**changes), query_tokens, equal_bits=equal_bits)
        if expected is None:
            assert found is None
            continue
        kind, requests, tokens, rows, context, verified, *scattered = expected
        decoded = Decoded(kind, rows, 0 if known is META else context, verified)
        plain = Content(kind, requests, tokens, decoded, *scattered[:1])
        assert found._replace(decoding=None) == plain
        assert (None if found.decoding is None else [*found.decoding]) == (
            scattered[1] if scattered else None
        )
        assert found.verifies == (tokens > requests)
    # The CPU's own lengths, and no word about prompts.
    changes = {"seq_lens_cpu_upper_bound": None, "is_prefilling": None}
    found = content_of(batch.common(**changes), query_tokens, equal_bits=equal_bits)
    assert expected is None or prefills or found.decoded.tokens == expected[4]


@pytest.mark.parametrize(
    ("queries", "changes", "reason"),
    [
        ([1, 1, 1, 30, 5], {}, None),
        ([1, 2, 1, 1, 1], {}, "decode rows behind prefills"),
        ([1, 1, 1, 30, 5], {"mm_req_doc_ranges": {3: [], 4: [(1, 2)]}}, DOCUMENTS),
        ([1, 1, 1, 30, 5], {"mm_req_doc_ranges": {3: []}}, None),
        ([1, 1, 1, 30, 5], {"num_actual_tokens": 37}, "prefills of unknown lengths"),
        ([1, 1, 1, 30, 5], {"num_actual_tokens": 39}, "prefills of unknown lengths"),
        ([1, 1, 1, 30, 5], {"seq_lens_cpu_upper_bound": None}, "prefills of unknown lengths"),
    ],
)
def test_what_the_hosts_code_cannot_slice(queries, changes, reason):
    common = Batch(LENS, shared=2, query_lens=queries).common(**changes)
    assert unsplit(content_of(common, 1), common) == reason


@pytest.mark.parametrize("workspace", [False, True])
def test_the_rest_of_a_batch_gets_a_builder_of_its_own(workspace):
    """FlashInfer's builders share one workspace."""

    class Builder:
        def __init__(self, *given):
            self.calls = [given]
            if workspace:
                self.set_workspace_buffer = lambda buffer: self.calls.append(buffer)

        def build(self, prefix, rest, **options):
            self.calls.append((prefix, options))
            return rest

    first = SimpleNamespace(_get_workspace_buffer=lambda: "the workspace")
    rests = RestBuilder(SimpleNamespace(get_builder_cls=lambda: Builder), first, ("a", "b"))
    for prefilling in (None, torch.tensor(PREFILLS[3, 4])):
        batch = Batch(LENS, shared=2, query_lens=[1, 1, 1, 30, 5])
        common = batch.common(is_prefilling=prefilling)
        rest = rests.build(content_of(common, 1), common, fast_build=True)
        assert (rest.num_reqs, rest.num_actual_tokens, rest.max_query_len) == (2, 35, 30)
        assert rest.query_start_loc.tolist() == [0, 30, 35]
        assert rest.seq_lens.tolist() == [50, 5]
        assert prefilling is None or rest.is_prefilling.tolist() == [True, True]
    told = [*(["the workspace"] * workspace), (0, {"fast_build": True})]
    assert rests.builder.calls == [("a", "b"), *told * 2]

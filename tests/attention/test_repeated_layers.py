"""Later layers of a step: their launches take exactly what a full run would pass."""

import pytest
import torch

from attention_checks import tree_attention
from deft_backend.attention import Gpu, layer_addresses
from deft_backend.attention.planned_attention import PlannedBatch
from deft_backend.kernels import layer_launches
from deft_backend.shapes import QueryBlocks
from made_kernels import noted_launches

HEADS, KV_HEADS, DIM, PAGE, BATCH = 8, 2, 64, 16, 6


@pytest.fixture
def launches(monkeypatch):
    """Full launches, and repeated ones, of tensors on the CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    return noted_launches(monkeypatch, layer_launches)


class Step:
    """A planned step of an attention for a GPU that is not at hand, and layers for it."""

    def __init__(self, tokens=1, kv_dtype=None, sinks=False, cap=0.0, ragged=False):
        size = {"num_query_heads": HEADS, "page_size": PAGE, "max_batch": 64}
        kind = {"dtype": torch.bfloat16, "kv_dtype": kv_dtype, "query_tokens": tokens}
        self.attention = tree_attention(**size, **kind, compiled_for=Gpu.named("sm_90"))
        self.tokens, self.kv_dtype, self.sinks = tokens, kv_dtype or torch.bfloat16, sinks
        self.options = {"sm_scale": 0.1, "logit_cap": cap}
        self.table = torch.zeros((64, 40), dtype=torch.int32)
        self.lens = torch.full((BATCH,), 99, dtype=torch.int32)
        starts = torch.arange(BATCH + 1, dtype=torch.int32) * tokens
        self.starts = starts if ragged else None
        self.plan()

    def plan(self):
        blocks = QueryBlocks.of(self.tokens, HEADS // KV_HEADS)
        self.attention.batch = PlannedBatch(BATCH, from_rows=True, blocks=blocks)

    def layer(self, **changes):
        cache = torch.zeros((9, KV_HEADS, PAGE, 2 * DIM), dtype=self.kv_dtype).transpose(1, 2)
        found = {"k_cache": cache[..., :DIM], "v_cache": cache[..., DIM:], **self.options}
        if self.kv_dtype != torch.bfloat16:
            found |= {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
        if self.sinks:
            found["sinks"] = torch.zeros(HEADS)
        return found | changes

    def rows(self, more=0):
        """Queries and output of a layer, with rows of other requests behind the batch's."""
        rows = BATCH * self.tokens + more
        return torch.zeros((2, rows, HEADS, DIM), dtype=torch.bfloat16)

    def run(self, layer, q, out):
        rows = slice(BATCH * self.tokens)
        batch = {"page_table": self.table, "seq_lens": self.lens, "query_start": self.starts}
        self.attention.run(q[rows], out=out[rows], **batch, **layer)

    def repeat(self, layer, q, out):
        return self.attention.repeat(layer_addresses(**layer), q, out)

    def refuses(self, launches, layer, q, out):
        before = [*map(len, launches)]
        assert not self.repeat(layer, q, out)
        assert [*map(len, launches)] == before


KINDS = [
    {},
    {"cap": 30.0},
    {"sinks": True},
    {"tokens": 4},
    {"tokens": 4, "ragged": True},
    {"kv_dtype": torch.float8_e4m3fn},
    {"kv_dtype": torch.float8_e5m2, "sinks": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_repeated_run_passes_what_a_run_passes(kind, launches):
    step, (launched, repeated) = Step(**kind), launches
    step.run(step.layer(), *step.rows())
    for more in (0, 30):
        layer, rows = step.layer(), step.rows(more)
        launched.clear(), repeated.clear()
        assert step.repeat(layer, *rows)
        assert not launched
        step.run(layer, *rows)
        assert len(repeated) >= 2
        assert repeated == launched


OTHER_KINDS = [
    {"sm_scale": 0.2},
    {"logit_cap": 5.0},
    {"sinks": torch.zeros(HEADS)},
    {"k_cache": torch.zeros((9, PAGE, KV_HEADS, DIM), dtype=torch.bfloat16)},
    {"v_cache": torch.zeros((9, PAGE, KV_HEADS, DIM), dtype=torch.float16)},
]


def test_nothing_else_than_a_later_layer_of_the_plan_is_repeated(launches, monkeypatch):
    step = Step()
    layer, (q, out) = step.layer(), step.rows()
    step.refuses(launches, layer, q, out)  # the first layer
    step.run(layer, q, out)
    for changes in OTHER_KINDS:
        step.refuses(launches, layer | changes, q, out)
    assert step.repeat(layer, q, out)
    unaligned = torch.zeros(q.numel() + 1).bfloat16()[1:].view(q.shape)
    for other in (q[:-1], q.half(), q[:, :4], q.transpose(0, 1), unaligned):
        step.refuses(launches, layer, other, out)
        step.refuses(launches, layer, q, other)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.cuda, "current_device", lambda: 1)
        step.refuses(launches, layer, q, out)
    step.plan()
    step.refuses(launches, layer, q, out)  # the first layer of another plan
    for name in ("k_cache", "v_cache", "sinks", "k_scale", "v_scale"):  # each address alone
        eight = Step(kv_dtype=torch.float8_e4m3fn, sinks=True)
        eight.run(eight.layer(), q, out)
        layer = eight.layer()
        held = torch.zeros(layer[name].untyped_storage().nbytes() // layer[name].itemsize + 1)
        tensor = held.to(layer[name].dtype).as_strided(layer[name].shape, layer[name].stride(), 1)
        eight.refuses(launches, layer | {name: tensor}, q, out)
        assert eight.repeat(layer, q, out)
    for scale in (1.0, 0.5):  # whose tensor is made for one run
        eight = Step(kv_dtype=torch.float8_e4m3fn)
        eight.run(eight.layer(v_scale=scale), q, out)
        eight.refuses(launches, eight.layer(v_scale=scale), q, out)

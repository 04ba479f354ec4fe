"""``DEFT_DRAFT=tree``: a draft model's decode steps and extensions, eager and in graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deft_backend.settings.config import Settings
from sglang_fakes import (
    FakePool,
    Tree,
    decode_attention,
    load_host,
    make_layer,
    make_state,
    recording_backend,
    requests_of,
    small_attention,
)

PREFIX = list(range(10, 310))
PROMPTS = [[*PREFIX, 4, 5], [*PREFIX, 9]]
STEPS = 3
"""Decode steps of a draft of four tokens: the first one comes from the extension before."""
N = STEPS + 1


def mode(name: str) -> Any:
    return SimpleNamespace(
        is_decode=lambda: name == "decode",
        is_target_verify=lambda: False,
        is_idle=lambda: False,
        is_mixed=lambda: False,
        is_draft_extend_v2=lambda: name == "extension",
    )


class Server:
    """Backends of a draft model over a host that records its calls."""

    def __init__(self) -> None:
        from deft_backend.hosts.sglang.drafts.draft_extension import DraftExtension, ExtensionTokens
        from deft_backend.hosts.sglang.drafts.draft_steps import DraftStep, DraftSteps

        _, self.table, lens = requests_of(PROMPTS, Tree(), private=1 + N)
        self.lens = lens - N
        self.calls: list[str] = []
        self.pool = FakePool(400)
        kind = recording_backend(load_host(), self.pool, self.table, self.calls)
        container = kind()
        container.attn_backends = [kind() for _ in range(STEPS)]
        self.attention = small_attention(max_batch=3, query_tokens=N)
        state, settings = make_state(), Settings(min_batch=2)
        self.compiled: list[Any] = []
        self.steps = DraftSteps(
            container,
            [DraftStep(each, self.attention, state) for each in container.attn_backends],
            self.attention, torch.from_numpy(self.table), settings,
            lambda *dtypes: self.compiled.append(dtypes),
        )  # fmt: skip
        self.extension = DraftExtension(
            kind(), self.attention, state, settings, shows=False,
            verification=ExtensionTokens(N),
        )  # fmt: skip

    def batch(self, size: int = 2, kind: str = "decode", tokens: int = N) -> Any:
        """The requests, and padding of one token; an extension's lengths include its tokens."""
        lengths = torch.tensor([*self.lens.tolist(), 1][:size])
        if kind == "extension":
            lengths[:2] += N
        return SimpleNamespace(
            forward_mode=mode(kind), batch_size=size, seq_lens=lengths,
            req_pool_indices=torch.tensor([1, 2, 0][:size]), seq_lens_sum=0, seq_lens_cpu=None,
            spec_info=SimpleNamespace(num_tokens_per_req=tokens), out_cache_loc=None,
        )  # fmt: skip

    def draft(self, batch: Any, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and outputs of a draft's steps, run as the host runs them, with copies."""
        found = []
        for number, step in enumerate(self.steps.attn_backends):
            q, k, v = vectors(batch.batch_size, seed + number)
            places = [
                int(self.table[int(row), int(length) + number])
                for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True)
            ]
            copy = SimpleNamespace(**{**vars(batch), "out_cache_loc": torch.tensor(places)})
            found.append((q, step.forward(q, k, v, make_layer(), copy)))
        return found

    def check(self, batch: Any, drafted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        rows, lens = batch.req_pool_indices.tolist()[:2], batch.seq_lens.tolist()[:2]
        for number, (q, out) in enumerate(drafted):
            now = [length + number + 1 for length in lens]
            expected = decode_attention(self.pool, self.table, rows, now, q[:2])
            torch.testing.assert_close(out[:2].double(), expected, rtol=1e-5, atol=1e-6)


def vectors(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads * 64, generator=generator) for heads in (4, 2, 2))


@pytest.fixture
def server() -> Server:
    load_host()
    return Server()


def test_an_eager_draft(server: Server) -> None:
    batch = server.batch()
    server.steps.init_forward_metadata(batch)
    server.check(batch, server.draft(batch))
    assert server.calls == ["metadata"]  # for layers that the host may have to run


@pytest.mark.parametrize("size", [2, 3])
def test_the_lengths_of_each_step_are_aligned(server: Server, size: int) -> None:
    """Kernels for other pointers would be compiled in a step, and are slower."""
    batch = server.batch(size)
    server.steps.init_forward_metadata(batch)
    for number, step in enumerate(server.steps.attn_backends):
        assert step.seq_lens.data_ptr() % 16 == 0
        assert step.seq_lens.tolist() == [length + number + 1 for length in batch.seq_lens.tolist()]


def test_a_captured_draft_serves_later_batches(server: Server) -> None:
    static = server.batch(size=3)
    server.steps.init_forward_metadata_out_graph(static, in_capture=True)
    server.steps.init_forward_metadata_in_graph(static)
    server.draft(static)
    assert server.compiled == [(torch.int64, torch.int64)]
    assert server.calls == ["capture", "in graph"]
    # A replay reads the buffers of the capture and calls nothing.
    server.steps.init_forward_metadata_out_graph(server.batch(size=3))
    assert server.calls == ["capture", "in graph"]
    for row, shorter in enumerate((2, 1)):
        static.seq_lens[row] -= shorter
    server.steps.init_forward_metadata_out_graph(static, in_capture=True)
    server.steps.init_forward_metadata_in_graph(static)
    server.check(static, server.draft(static, seed=7))


def test_a_replay_prepares_the_hosts_metadata_for_a_model_that_reads_it(server: Server) -> None:
    from deft_backend.hosts.sglang.drafts.draft_steps import DraftStep

    server.steps.attn_backends = [
        DraftStep(step._host, server.attention, make_state(), model_asks=True)
        for step in server.steps.attn_backends
    ]
    static = server.batch(size=3)
    server.steps.init_forward_metadata_out_graph(static, in_capture=True)
    server.steps.init_forward_metadata_in_graph(static)
    server.check(static, server.draft(static))
    server.steps.init_forward_metadata_out_graph(static)
    assert server.calls == ["capture", "in graph", "replay"]


def test_the_host_drafts_what_is_too_small_or_unplanned(server: Server, monkeypatch: Any) -> None:
    batch = server.batch(size=1)
    server.steps.init_forward_metadata(batch)
    server.draft(batch)
    assert server.calls == ["metadata", *["decode"] * STEPS]
    server.calls.clear()
    batch = server.batch()
    server.steps.init_forward_metadata(batch)
    other = server.batch()  # not the planned one: what it speculates is another object
    server.draft(other)
    assert server.calls == ["metadata", *["decode"] * STEPS]
    server.calls.clear()
    server.steps.init_forward_metadata_out_graph(server.batch(size=1), in_capture=True)
    server.steps.init_forward_metadata_out_graph(server.batch(size=1))
    assert server.calls == ["capture", "replay"]


@pytest.mark.parametrize("at", ["plan_on_device", "run", "compile"])
def test_a_failure_leaves_drafts_to_the_host(
    server: Server, at: str, monkeypatch: Any, caplog: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not here")

    if at == "compile":
        monkeypatch.setattr(server.steps, "_compile_for", fail)
    else:
        monkeypatch.setattr(server.attention, at, fail)
    static = server.batch(size=3)
    server.steps.init_forward_metadata_out_graph(static, in_capture=True)
    server.steps.init_forward_metadata_in_graph(static)
    server.draft(static)
    assert server.calls == ["capture", "in graph", *["decode"] * STEPS]
    assert "not here" in caplog.text
    monkeypatch.undo()
    server.calls.clear()
    server.steps.init_forward_metadata_out_graph(static)  # the graph holds the host's kernels
    server.steps.init_forward_metadata(static)
    server.draft(static)
    assert server.calls == ["replay", "metadata", *["decode"] * STEPS]


def extend(server: Server, batch: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = vectors(batch.batch_size * N, seed)
    copy = SimpleNamespace(**vars(batch))
    return q, server.extension.forward(q, k, v, make_layer(), copy, False)


def check_extension(server: Server, batch: Any, q: torch.Tensor, out: torch.Tensor) -> None:
    rows, lens = batch.req_pool_indices.tolist()[:2], batch.seq_lens.tolist()[:2]
    for token in range(N):
        seen = [length - N + token + 1 for length in lens]
        queries, found = (part.view(-1, N, 256)[:2, token] for part in (q, out))
        expected = decode_attention(server.pool, server.table, rows, seen, queries)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_eager_extension(server: Server) -> None:
    batch = server.batch(kind="extension")
    server.extension.init_forward_metadata(batch)
    check_extension(server, batch, *extend(server, batch))
    assert server.calls == ["metadata"]


def test_an_extension_in_a_graph_with_a_padding_request(server: Server) -> None:
    """The padding request has one token, fewer than its query tokens."""
    static = server.batch(size=3, kind="extension")
    server.extension.init_forward_metadata_out_graph(static, in_capture=True)
    server.extension.init_forward_metadata_in_graph(static)
    q, out = extend(server, static)
    check_extension(server, static, q, out)
    assert out.isfinite().all()
    server.extension.init_forward_metadata_out_graph(server.batch(size=3, kind="extension"))
    assert server.calls == ["capture", "in graph"]


def test_the_host_runs_other_passes_of_a_draft_model(server: Server) -> None:
    for batch in (
        server.batch(kind="prefill"),
        server.batch(kind="extension", tokens=N + 1),
        server.batch(kind="extension", size=1),
    ):
        server.calls.clear()
        server.extension.init_forward_metadata(batch)
        extend(server, batch)
        assert server.calls == ["metadata", "extend"]


def padded(batch: Any, tokens: int) -> Any:
    """A copy of a planned batch with one more request, for ranks that share its tokens."""
    return SimpleNamespace(**{
        **vars(batch), "batch_size": batch.batch_size + 1,
        "seq_lens": torch.cat([batch.seq_lens, torch.tensor([1])]),
        "req_pool_indices": torch.cat([batch.req_pool_indices, torch.tensor([0])]),
        "out_cache_loc": torch.zeros(tokens, dtype=torch.int64),
    })  # fmt: skip


def test_an_eager_pass_that_is_padded_after_its_planning(server: Server) -> None:
    draft, extension = server.batch(), server.batch(kind="extension")
    server.steps.init_forward_metadata(draft)
    found = []
    for number, step in enumerate(server.steps.attn_backends):
        q, k, v = vectors(3, seed=number)
        found.append((q, step.forward(q, k, v, make_layer(), padded(draft, 3), False)))
    server.check(draft, found)
    server.extension.init_forward_metadata(extension)
    for tokens in (2 * N + 1, 3 * N):
        q, k, v = vectors(tokens, seed=tokens)
        copy = padded(extension, tokens)
        copy.batch_size = tokens // N
        out = server.extension.forward(q, k, v, make_layer(), copy, False)
        check_extension(server, extension, q[: 2 * N], out[: 2 * N])
        assert not out[2 * N :].any()
    assert server.calls == ["metadata", "metadata"]


def test_a_draft_and_its_extension_alternate(server: Server) -> None:
    """They share one plan's arrays."""
    for turn in range(3):
        draft, extension = server.batch(), server.batch(kind="extension")
        server.steps.init_forward_metadata(draft)
        server.check(draft, server.draft(draft, seed=turn))
        server.extension.init_forward_metadata(extension)
        check_extension(server, extension, *extend(server, extension, seed=turn))


class Runner(SimpleNamespace):
    __hash__ = object.__hash__


def runner_of(**arguments: Any) -> Any:
    return Runner(
        server_args=SimpleNamespace(speculative_num_draft_tokens=N, **arguments),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(9, 64, dtype=torch.int32)),
        model=torch.nn.Linear(1, 1),
    )


@pytest.fixture
def factory(server: Server, monkeypatch: Any) -> Any:
    """The host's factory of a draft model's backends, and the plugin's parts without a model."""
    draft_utils = pytest.importorskip("sglang.srt.speculative.draft_utils")
    from deft_backend.hosts.sglang.drafts import draft_model
    from deft_backend.hosts.sglang.start.layers import Division

    division = Division((4, 2, 64), (0,), {1: "a sliding window"})
    made = draft_model._Parts(server.attention, make_state(), division, None)
    monkeypatch.setattr(draft_model, "_parts", lambda runner, settings: made)
    monkeypatch.setattr(draft_model, "ignored_scales", lambda *given: None)
    monkeypatch.setattr(draft_model, "unsupported_model", lambda runner: None)
    monkeypatch.setattr(draft_model, "read_end", lambda: "the end")
    monkeypatch.setattr(draft_model, "decode_graphs", lambda arguments: "full")
    monkeypatch.setattr(draft_model, "extension_graphs_ask", lambda: True)
    real = draft_utils.DraftBackendFactory

    class Factory:
        def __init__(self, runner: Any, topk: int, steps: int = STEPS) -> None:
            self.draft_model_runner, self.topk, self.steps = runner, topk, steps

        def create_decode_backend(self) -> Any:
            return server.steps._host if self.steps else None

        def create_draft_extend_backend(self) -> Any:
            return server.extension._host

    for name in ("create_decode_backend", "create_draft_extend_backend"):
        assert hasattr(real, name)
    monkeypatch.setattr(draft_utils, "DraftBackendFactory", Factory)
    yield Factory
    from deft_patches.sglang import draft_backends

    draft_backends.remove()


def test_the_hosts_backends_are_surrounded(factory: Any, server: Server, caplog: Any) -> None:
    from deft_backend.hosts.sglang.drafts.draft_extension import DraftExtension
    from deft_backend.hosts.sglang.drafts.draft_model import surround_draft_model
    from deft_backend.hosts.sglang.drafts.draft_steps import DraftSteps

    caplog.set_level("INFO", "deft_backend")
    host_steps, host_extension = server.steps._host, server.extension._host
    surround_draft_model(Settings(), "fa3")
    assert factory(runner_of(), 1).create_decode_backend() is host_steps
    assert caplog.messages == ["deft: the draft model's attention runs through fa3"]
    for _ in range(2):  # a second engine in the process wraps nothing twice
        surround_draft_model(Settings(draft="tree"), "fa3")
        runner = runner_of()
        steps = factory(runner, 1).create_decode_backend()
        extension = factory(runner, 1).create_draft_extend_backend()
        assert isinstance(steps, DraftSteps)
        assert steps._host is host_steps
        assert [step._host for step in steps.attn_backends] == host_steps.attn_backends
        assert type(extension) is DraftExtension
        assert isinstance(extension, type(host_extension))  # as the host's checks see it
        assert extension._host is host_extension
        assert extension._layers == steps.attn_backends[0]._layers == {1: "a sliding window"}
        assert factory(runner, 1, steps=0).create_decode_backend() is None
    assert sum("drafts go through tree attention" in line for line in caplog.messages) == 2
    caplog.clear()
    runner = runner_of()
    assert factory(runner, 2).create_decode_backend() is host_steps
    assert "a draft has 2 branches" in caplog.text
    assert factory(runner, 2).create_draft_extend_backend() is not host_extension
    surround_draft_model(Settings(), "fa3")
    assert factory(runner_of(), 1).create_draft_extend_backend() is host_extension


def test_what_the_model_reads_of_its_backend_stays_current(factory: Any, monkeypatch: Any) -> None:
    from deft_backend.hosts.sglang.drafts import draft_model

    draft_model.surround_draft_model(Settings(draft="tree"), "fa3")
    for asks in (False, True):
        monkeypatch.setattr(draft_model, "model_asks", lambda runner, asks=asks: asks)
        runner = runner_of()
        steps = factory(runner, 1).create_decode_backend().attn_backends
        extension = factory(runner, 1).create_draft_extend_backend()
        assert all(each.host_in_graphs is asks for each in steps)
        assert extension._host_in_graphs is asks


def test_a_failing_set_up_leaves_the_hosts_backends(
    factory: Any, server: Server, monkeypatch: Any, caplog: Any
) -> None:
    """For example a backend of the host without a pool, or a model whose source is not found."""
    from deft_backend.hosts.sglang.drafts import draft_model

    def fail(runner: Any) -> bool:
        raise KeyError("no such module")

    monkeypatch.setattr(draft_model, "model_asks", fail)
    draft_model.surround_draft_model(Settings(draft="tree"), "fa3")
    made = factory(runner_of(), 1)
    assert made.create_decode_backend() is server.steps._host
    assert made.create_draft_extend_backend() is server.extension._host
    for what in ("decode steps", "draft extensions"):
        assert f"the draft model's {what} run through fa3" in caplog.text


@pytest.mark.parametrize("graphs", ["full", "disabled"])
def test_graphs_that_do_not_ask_hold_no_extension(
    factory: Any, server: Server, graphs: str, monkeypatch: Any, caplog: Any
) -> None:
    """The scheduler would write page tables while such a graph reads them."""
    from deft_backend.hosts.sglang.drafts import draft_model
    from deft_backend.hosts.sglang.drafts.draft_steps import DraftSteps

    monkeypatch.setattr(draft_model, "decode_graphs", lambda arguments: graphs)
    monkeypatch.setattr(draft_model, "extension_graphs_ask", lambda: False)
    draft_model.surround_draft_model(Settings(draft="tree"), "fa3")
    runner = runner_of()
    # The steps are read before: the host takes page tables for read when an extension begins.
    assert isinstance(factory(runner, 1).create_decode_backend(), DraftSteps)
    extension = factory(runner, 1).create_draft_extend_backend()
    assert (extension is server.extension._host) is (graphs == "full")
    assert ("SGLang 0.5.22 or newer" in caplog.text) is (graphs == "full")


def test_which_hosts_ask_is_read_from_their_graphs() -> None:
    load_host()
    from deft_backend.hosts.sglang.versions import SGLANG, extension_graphs_ask

    version = SGLANG.installed()
    assert version is not None
    release = tuple(int(part) for part in version.split(".")[:3])
    assert extension_graphs_ask() is (release >= (0, 5, 22))


@pytest.mark.parametrize(
    ("arguments", "missing", "reason"),
    [
        ({"enable_dp_attention": True}, {}, "DP attention is not supported"),
        ({"enable_multi_layer_eagle": True}, {}, "several draft layers"),
        ({"speculative_draft_window_size": 512}, {}, "a window for drafts"),
        ({}, {"read_end": None}, "SGLang 0.5.18 or newer is needed"),
        ({}, {"unsupported_model": "a pool of another kind"}, "a pool of another kind"),
    ],
)
def test_what_cannot_be_surrounded_stays_the_hosts(
    factory: Any, server: Server, arguments: Any, missing: Any, reason: str, monkeypatch: Any,
    caplog: Any,
) -> None:  # fmt: skip
    from deft_backend.hosts.sglang.drafts import draft_model

    for name, value in missing.items():
        monkeypatch.setattr(draft_model, name, lambda *given, value=value: value)
    draft_model.surround_draft_model(Settings(draft="tree"), "fa3")
    made = factory(runner_of(**arguments), 1)
    assert made.create_decode_backend() is server.steps._host
    assert made.create_draft_extend_backend() is server.extension._host
    lines = [line for line in caplog.messages if reason in line]
    assert len(lines) == 1
    assert lines[0].startswith("deft: the draft model's attention runs through fa3")

"""The SGLang adapter against light stand-ins for the host: forests, staleness, delegation."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deft_backend.config import Settings, SettingsError
from deft_backend.forest import PrefixForest, forest_from_page_tables
from deft_backend.hosts.sglang.capture import BatchCapture
from deft_backend.hosts.sglang.decode_plan import DecodePlanner, loaded_tokens
from deft_backend.hosts.sglang.layers import unsupported_layer
from deft_backend.hosts.sglang.radix_forest import PRIVATE, forest_of, key_of, known_tree, path_of
from deft_backend.hosts.sglang.verify import disagreement
from deft_backend.hosts.state import ServerState, StateWriter
from deft_backend.planner import OPEN_END, PlanCapacity, plan_forest
from deft_backend.policies import POLICY_NAMES, Target, get_policy

EAGER = Settings(min_batch=1, min_share=1.0, min_shared_tokens=0)


class Node:
    """A node of the host's radix tree, as far as the adapter looks at it."""

    counter = 0

    def __init__(self, parent: Node | None, key: list[int]) -> None:
        Node.counter += 1
        self.id = Node.counter
        self.parent = parent
        self.key = key
        self.slots: list[int] = []
        self.children: dict[int, Node] = {}


class Tree:
    """A radix tree that splits nodes as the host's does: the new node goes above the old one."""

    def __init__(self) -> None:
        self.root = Node(None, [])
        self.next_slot = 1

    def insert(self, tokens: list[int]) -> tuple[Node, list[int]]:
        """The node that ends `tokens`, and their slots."""
        node, slots = self.root, []
        while tokens:
            child = node.children.get(tokens[0])
            if child is None:
                child = Node(node, tokens)
                child.slots = self.take(len(tokens))
                node.children[tokens[0]] = child
                return child, slots + child.slots
            shared = 0
            while shared < min(len(child.key), len(tokens)) and child.key[shared] == tokens[shared]:
                shared += 1
            if shared < len(child.key):
                upper = Node(node, child.key[:shared])
                upper.slots, child.slots = child.slots[:shared], child.slots[shared:]
                node.children[tokens[0]] = upper
                child.key, child.parent = child.key[shared:], upper
                upper.children[child.key[0]] = child
                child = upper
            slots += child.slots
            tokens, node = tokens[shared:], child
        return node, slots

    def take(self, count: int) -> list[int]:
        self.next_slot += count
        return list(range(self.next_slot - count, self.next_slot))


def make_request(node: Node | None, owned: int, row: int | None = 0, rid: str = "r") -> Any:
    return SimpleNamespace(last_node=node, cache_protected_len=owned, req_pool_idx=row, rid=rid)


def requests_of(prompts: list[list[int]], tree: Tree, private: int = 1) -> tuple[Any, Any, Any]:
    """Requests over a tree, their page table, and their lengths (`private` tokens beyond)."""
    made = []
    for prompt in prompts:
        node, slots = tree.insert(prompt)
        made.append((node, slots + tree.take(private)))
    longest = max(len(slots) for _, slots in made)
    table = np.zeros((len(made) + 1, longest), dtype=np.int32)
    requests = []
    for row, (node, slots) in enumerate(made, start=1):
        table[row, : len(slots)] = slots
        requests.append(make_request(node, len(slots) - private, row, f"r{row}"))
    return requests, table, np.array([len(slots) for _, slots in made])


ARRAYS = ("order", "parent", "row", "start", "length", "query_begin", "query_end", "leaf")


@pytest.mark.parametrize("seed", range(20))
def test_tree_and_page_tables_agree(seed: int) -> None:
    """Random prompts over a small alphabet split each other's nodes."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    requests, table, lens = requests_of(prompts, Tree())
    ours, theirs = forest_of(requests, lens), forest_from_page_tables(table[1:], lens)
    assert ours.tokens_stored < ours.tokens_attended
    for name in ARRAYS:
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    rows = torch.arange(1, len(prompts) + 1)
    assert disagreement(ours, torch.from_numpy(table), rows) is None


def test_a_split_leaves_keys_as_they_are() -> None:
    """A plan survives the split of a node: rows, ranges and keys stay."""
    tree = Tree()
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], tree)
    before, keys = forest_of(requests, lens), [key_of(r) for r in requests]
    tree.insert([1, 2, 9])
    assert requests[0].last_node.key == [3, 4]
    assert [key_of(r) for r in requests] == keys
    after = forest_of(requests, lens)
    for name in ARRAYS:
        assert getattr(before, name).tolist() == getattr(after, name).tolist(), name


def test_the_current_token_is_always_private() -> None:
    tree = Tree()
    node, _ = tree.insert([1, 2, 3, 4])
    pair = [make_request(node, 4), make_request(node, 4)]
    forest = forest_of(pair, np.array([4, 4]))  # as long as the path: cut to 3
    assert forest.length[forest.leaf].tolist() == [1, 1]
    assert forest.length[0] == 3


def test_only_what_the_tree_owns_is_shared() -> None:
    """A node that one request holds in part is not the node that another holds whole."""
    node, _ = Tree().insert([1, 2, 3, 4])
    assert path_of(make_request(node, 2), 9) == [((node.id, 2), 2)]
    forest = forest_of([make_request(node, 2), make_request(node, 4)], np.array([9, 9]))
    assert forest.tokens_stored == forest.tokens_attended == 18


def test_requests_without_a_place_in_the_tree_are_private() -> None:
    node, _ = Tree().insert([1, 2, 3])
    freed = make_request(node, 3, row=None)
    assert key_of(freed) == key_of(make_request(None, 0)) == PRIVATE
    forest = forest_of([freed, make_request(node, 3), make_request(None, 3)], np.array([5, 5, 5]))
    assert forest.tokens_stored == 15


@pytest.mark.parametrize(
    ("module", "name", "known"),
    [
        ("sglang.srt.mem_cache.radix_cache", "RadixCache", True),
        ("sglang.srt.mem_cache.chunk_cache", "ChunkCache", True),
        ("sglang.srt.mem_cache.chunk_cache", "SWAChunkCache", False),
        ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache", False),
        ("sglang.srt.session.streaming_session", "StreamingSession", False),
    ],
)
def test_known_trees(module: str, name: str, known: bool) -> None:
    cache = type(name, (), {"__module__": module, "is_eagle": False})()
    reason = known_tree(cache)
    assert (reason is None) == known
    assert known or name in str(reason)


def test_verification_finds_a_wrong_forest() -> None:
    requests, table, lens = requests_of([[1, 2, 3], [1, 2, 4], [7, 8]], Tree())
    rows = torch.arange(1, 4)
    good = forest_of(requests, lens)
    page_table = torch.from_numpy(table)
    assert disagreement(good, page_table, rows) is None
    wrong = page_table.clone()
    wrong[2, 1] = 99
    assert "[0, 1] do not share tokens 0 to 2" in str(disagreement(good, wrong, rows))
    alone = forest_of([make_request(None, 0)] * 3, lens)  # misses what is shared
    assert "the page tables give" in str(disagreement(alone, page_table, rows))


class FakeAttention:
    """Plans for real, on the host; counts how often."""

    def __init__(self, policy: str = "deft-node") -> None:
        self.policy = get_policy(policy)
        self.forests: list[PrefixForest] = []

    def plan(self, forest: PrefixForest) -> Any:
        self.forests.append(forest)
        target = Target(num_query_heads=4, num_kv_heads=2, head_dim=64)
        return plan_forest(forest, self.policy, target, PlanCapacity.for_batch(64))[0]


def make_state() -> ServerState:
    return ServerState(
        port=1, rank=0, host="sglang", host_version="0", backend="deft", policy="auto",
        device="cpu", dtype="float32", num_layers=2, num_query_heads=4, num_kv_heads=2,
        head_dim=64, dtype_bytes=4,
    )  # fmt: skip


def make_planner(settings: Settings = EAGER, verify: Any = None) -> tuple[DecodePlanner, Any]:
    attention = FakeAttention()
    return DecodePlanner(attention, settings, make_state(), verify), attention


def step(planner: DecodePlanner, requests: list[Any], lens: Any) -> Any:
    lens = np.asarray(lens)
    return planner.step(requests, lens, int(lens.sum()))


def test_a_steady_batch_is_planned_once() -> None:
    requests, _, lens = requests_of([[1, 2, 3], [1, 2, 4]], Tree())
    planner, attention = make_planner()
    first = step(planner, requests, lens)
    for grown in range(1, 200):
        assert step(planner, requests, lens + grown) is first
    assert len(attention.forests) == 1


def test_a_changed_composition_is_planned_anew() -> None:
    tree = Tree()
    requests, _, lens = requests_of([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], tree)
    planner, attention = make_planner()
    step(planner, requests[:2], lens[:2])
    step(planner, requests, lens)  # joined
    step(planner, requests[1:], lens[1:])  # finished, aborted or retracted
    step(planner, requests[:0:-1], lens[:0:-1])  # another order
    assert len(attention.forests) == 4
    requests[1].last_node, _ = tree.insert([1, 2, 4, 4])  # its prefill's result entered the tree
    requests[1].cache_protected_len = 4
    step(planner, requests[:0:-1], lens[:0:-1] + 1)
    assert len(attention.forests) == 5
    requests[1].req_pool_idx = None  # freed, but still in flight for one step
    step(planner, requests[:0:-1], lens[:0:-1] + 2)
    assert len(attention.forests) == 6
    assert attention.forests[-1].tokens_stored == attention.forests[-1].tokens_attended


def test_a_row_shorter_than_its_shared_part_is_planned_anew() -> None:
    """Cannot happen unless the host rewinds a request; then sharing must shrink with it."""
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], Tree())
    planner, attention = make_planner()
    step(planner, requests, lens)
    assert len(attention.forests) == 1
    planned = step(planner, requests, [3, 5])
    assert len(attention.forests) == 2
    assert planned.shared.tolist() == [0, 0]  # a part of a node is not the whole node


def test_leaves_that_grew_much_are_balanced_anew() -> None:
    requests, _, lens = requests_of([[1, 2], [1, 2]], Tree())
    planner, attention = make_planner()
    step(planner, requests, lens)
    step(planner, requests, lens + 256)
    assert len(attention.forests) == 1
    step(planner, requests, lens + 257)
    assert len(attention.forests) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(min_batch=3), "batch below DEFT_MIN_BATCH"),
        (Settings(max_batch=1), "batch above DEFT_MAX_BATCH"),
        (Settings(min_share=1.9), "shares less than DEFT_MIN_SHARE"),
        (Settings(min_share=1.0, min_shared_tokens=5), "saves less than DEFT_MIN_SHARED_TOKENS"),
        (Settings(min_share=1.5, min_shared_tokens=4), None),
    ],
)
def test_thresholds(settings: Settings, reason: str | None) -> None:
    """Two requests share 4 tokens and hold 1 each: 10 attended, 6 stored."""
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], Tree())
    planner, attention = make_planner(settings)
    assert step(planner, requests, lens).host_reason == reason
    assert len(attention.forests) == (reason is None)


def test_a_plan_that_fails_verification_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    requests, _, lens = requests_of([[1, 2], [1, 2]], Tree())
    planner, attention = make_planner(verify=lambda forest, batch: "row 1 is wrong")
    assert step(planner, requests, lens).host_reason == "verification failed"
    assert not attention.forests
    assert "row 1 is wrong" in caplog.text


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_loaded_tokens_follow_growth(policy: str) -> None:
    """What a step loads, by the plan's own items, before and after every row grew by 3."""
    requests, _, lens = requests_of([[1] * 70, [1] * 60 + [2] * 9, [3] * 5], Tree())
    attention = FakeAttention(policy)
    planner = DecodePlanner(attention, EAGER, make_state())
    planned = step(planner, requests, lens)
    plan = attention.plan(attention.forests[0])

    def counted(lengths: Any) -> int:
        total = 0
        for row, start, end in zip(
            plan.segment_row, plan.segment_start, plan.segment_end, strict=True
        ):
            total += (lengths[row] if end == OPEN_END else end) - start
        return total

    assert planned.loads(int(lens.sum())) == counted(lens) == loaded_tokens(plan, lens)[0]
    assert planned.loads(int(lens.sum()) + 9) == counted(lens + 3)


def test_capture_knows_its_batch_by_the_list_of_ids() -> None:
    runner, decode = object(), SimpleNamespace(is_decode=lambda: True)
    capture = BatchCapture(runner)
    rids = ["a", "b"]
    made = SimpleNamespace(forward_mode=decode, rids=rids)
    batch = SimpleNamespace(reqs=["ra", "rb"], tree_cache="tree")
    capture.observe(made, batch, runner)
    replaced = SimpleNamespace(forward_mode=decode, rids=rids)
    found = capture.of(replaced)
    assert found is not None
    assert (found.requests, found.tree_cache) == (["ra", "rb"], "tree")
    assert capture.of(SimpleNamespace(rids=["a", "b"])) is None  # equal, not the same
    assert capture.of(SimpleNamespace(rids=None)) is None
    capture.observe(SimpleNamespace(forward_mode=decode, rids=["c"]), batch, object())
    assert capture.of(replaced) is not None  # another runner's batch
    extend = SimpleNamespace(is_decode=lambda: False)
    capture.observe(SimpleNamespace(forward_mode=extend, rids=["d"]), batch, runner)
    assert capture.of(replaced) is None


def make_layer(**changes: Any) -> Any:
    layer = SimpleNamespace(
        is_cross_attention=False, attn_type=SimpleNamespace(value="decoder"),
        sliding_window_size=-1, use_irope=False, pos_encoding_mode="NONE", xai_temperature_len=-1,
        logit_cap=0.0, logit_capping_method="tanh", qk_head_dim=64, v_head_dim=64,
        tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, layer_id=0, scaling=0.125,
    )  # fmt: skip
    return SimpleNamespace(**{**vars(layer), **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"logit_cap": 30.0}, None),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "sigmoid capping"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "encoder_only attention"),
        ({"sliding_window_size": 0}, "a sliding window"),
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"use_irope": True}, "chunked local attention"),
        ({"pos_encoding_mode": "ALIBI"}, "position encoding ALIBI"),
        ({"xai_temperature_len": 4}, "a temperature"),
        ({"v_head_dim": 128}, "keys of 64 and values of 128"),
        ({"tp_q_head_num": 8}, "8 query and 2 KV heads of 64"),
        ({"qk_head_dim": 128, "v_head_dim": 128}, "4 query and 2 KV heads of 128"),
    ],
)
def test_layers(changes: dict[str, Any], reason: str | None) -> None:
    found = unsupported_layer(make_layer(**changes), 4, 2, 64)
    assert found is None if reason is None else reason in str(found)


def test_state_file(tmp_path) -> None:
    """Written atomically, when something changed; what it holds."""
    state = make_state()
    writer = StateWriter(state, tmp_path / "made", "-pp1")
    writer.write()
    assert writer.path.name == "1-tp0-pp1.json"
    first = writer.path.read_text()
    assert json.loads(first)["forest"] is None
    writer.write()
    assert writer.path.read_text() == first  # nothing changed: not written, not even the time

    requests, _, lens = requests_of([[1, 2], [1, 2]], Tree())
    state.forest = forest_of(requests, lens)
    state.rids = ["a", "b"]
    token = 2 * 2 * 64 * 4  # keys and values, KV heads, elements, bytes
    state.count_host("small", tokens=10)
    state.count_tree(tokens=6, loaded=4, tree_layers=1)
    writer.write()
    content = json.loads(writer.path.read_text())
    assert content["schema"] == 1
    assert content["steps_host"] == {"small": 1}
    assert (content["steps_tree"], content["decode_steps"]) == (1, 2)
    assert content["kv_bytes_query_guided"] == (10 + 6) * 2 * token
    assert content["kv_bytes_read"] == (10 * 2 + 4 + 6) * token
    assert content["forest"]["order"] == [0, 1]
    assert content["forest"]["rids"] == ["a", "b"]
    assert content["forest"]["page_size"] == 1
    assert [p.name for p in writer.path.parent.iterdir()] == [writer.path.name]


def test_a_state_file_that_cannot_be_written_is_said_once(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    state = make_state()
    writer = StateWriter(state, tmp_path / "file")
    writer.write()
    state.count_host("x", 1)
    writer.write()
    assert len(caplog.records) == 1
    assert "the server's state is not written" in caplog.text


# -- with the host's own classes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def host() -> Any:
    """The host's base class, importable without a driver through the stand-in for it."""
    pytest.importorskip("sglang")
    import ctypes

    from deft_backend.hosts.driver_stub import SONAME, ensure_driver_stub, has_nvidia_driver

    if not has_nvidia_driver():
        ctypes.CDLL(str(ensure_driver_stub() / SONAME), mode=ctypes.RTLD_GLOBAL)
    import sglang.srt.layers.attention.base_attn_backend as module

    return module


class FakePool:
    def __init__(self, slots: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.k = torch.randn(slots, 2, 64, generator=generator)
        self.v = torch.randn(slots, 2, 64, generator=generator)

    def set_kv_buffer(self, layer: Any, loc: Any, k: Any, v: Any) -> None:
        self.k[loc.loc], self.v[loc.loc] = k.view(-1, 2, 64), v.view(-1, 2, 64)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


@pytest.fixture
def server(host: Any) -> Any:
    """A backend over a fake host backend that records its calls, with two sharing requests."""
    from deft_backend.attention import TreeAttention
    from deft_backend.hosts.sglang.backend import DeftAttentionBackend

    requests, table, lens = requests_of([[1, 2, 3, 4, 5], [1, 2, 3, 9]], Tree())
    calls: list[str] = []

    class HostBackend(host.AttentionBackend):
        needs_cpu_seq_lens = False
        extra = "of the host"
        token_to_kv_pool = FakePool()
        req_to_token_pool = SimpleNamespace(req_to_token=torch.from_numpy(table))

        def init_forward_metadata(self, forward_batch: Any) -> None:
            calls.append("metadata")

        def forward_decode(self, q: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("decode")
            return torch.zeros_like(q)

        def forward_extend(self, q: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("extend")
            return q

        def support_triton(self) -> bool:
            return False

    runner = object()
    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
        max_batch=4, policy="deft-node",
    )  # fmt: skip
    state = make_state()
    capture = BatchCapture(runner)
    planner = DecodePlanner(attention, EAGER, state)
    backend = DeftAttentionBackend(HostBackend(), attention, planner, capture, state)

    class Mode:
        def __init__(self, decode: bool) -> None:
            self.is_decode = lambda: decode
            self.is_idle = lambda: False
            self.is_mixed = lambda: False

    def batch(decode: bool = True, captured: bool = True) -> Any:
        made = SimpleNamespace(
            forward_mode=Mode(decode), rids=["a", "b"], batch_size=2,
            seq_lens=torch.from_numpy(lens), seq_lens_cpu=torch.from_numpy(lens),
            seq_lens_sum=int(lens.sum()), req_pool_indices=torch.tensor([1, 2]),
            out_cache_loc=torch.tensor([table[i + 1, n - 1] for i, n in enumerate(lens)]),
        )  # fmt: skip
        if captured:
            cache = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})()
            capture.observe(made, SimpleNamespace(reqs=requests, tree_cache=cache), runner)
        return made

    return SimpleNamespace(
        backend=backend, calls=calls, batch=batch, state=state, table=table, lens=lens,
        pool=HostBackend.token_to_kv_pool, attention=attention, capture=capture,
    )  # fmt: skip


def query(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads * 64, generator=generator) for heads in (4, 2, 2))  # type: ignore[return-value]


def expected_attention(server: Any, q: torch.Tensor, scale: float) -> torch.Tensor:
    """Decode attention in float64, request by request, over the page table."""
    out = torch.empty(2, 4, 64, dtype=torch.float64)
    for row, length in enumerate(server.lens):
        slots = torch.from_numpy(server.table[row + 1, :length]).long()
        for head in range(4):
            keys = server.pool.k[slots, head // 2].double()
            weights = (keys @ q.view(2, 4, 64)[row, head].double() * scale).softmax(0)
            out[row, head] = weights @ server.pool.v[slots, head // 2].double()
    return out.view(2, -1)


def test_a_shared_decode_batch_goes_through_the_tree(server: Any) -> None:
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    out = server.backend.forward(q=q, k=k, v=v, layer=make_layer(), forward_batch=batch)
    assert server.calls == []
    expected = expected_attention(server, q, 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert server.pool.k[batch.out_cache_loc].flatten().tolist() == k.flatten().tolist()
    assert (server.state.steps_tree, server.state.plans) == (1, 1)
    assert server.state.kv_bytes_read < server.state.kv_bytes_query_guided


def test_layers_that_are_left_to_the_host_get_its_metadata_once(server: Any, caplog) -> None:
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    windowed = [make_layer(sliding_window_size=8, layer_id=i) for i in (1, 2)]
    for layer in windowed:
        server.backend.forward(q, k, v, layer, batch)
    assert server.calls == ["metadata", "decode", "decode"]
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "decode", "decode"]
    assert caplog.text.count("layers with a sliding window decode through the host's") == 1


@pytest.mark.parametrize("change", [{"sinks": torch.zeros(4)}, {"k": None}])
def test_arguments_that_are_not_known_are_handed_on(server: Any, change: dict[str, Any]) -> None:
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == []
    arguments = {"q": q, "k": k, "v": v, "layer": make_layer(), "forward_batch": batch, **change}
    server.backend.forward(**arguments)
    assert server.calls == ["metadata", "decode"]


@pytest.mark.parametrize("kind", ["extend", "not captured", "padded", "unknown tree", "no lengths"])
def test_other_batches_are_handed_on(server: Any, kind: str) -> None:
    batch, (q, k, v) = server.batch(kind != "extend", kind != "not captured"), query()
    if kind == "padded":
        batch.batch_size = 4
    if kind == "unknown tree":
        server.capture.observe(batch, SimpleNamespace(reqs=[1, 2], tree_cache=object()),
                               server.capture._runner)  # fmt: skip
    if kind == "no lengths":
        batch.seq_lens_cpu = None
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "extend" if kind == "extend" else "decode"]
    assert server.state.steps_tree == 0
    reasons = {"not captured": "no requests behind the batch", "padded": "padded batch",
               "unknown tree": "unknown tree cache"}  # fmt: skip
    assert list(server.state.steps_host) == ([reasons[kind]] if kind in reasons else [])


def test_planning_that_fails_costs_a_line(server: Any, caplog, monkeypatch) -> None:
    def fail(forest: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(server.attention, "plan", fail)
    batch, (q, k, v) = server.batch(), query()
    for _ in range(2):
        server.backend.init_forward_metadata(batch)
        server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "decode"] * 2
    assert caplog.text.count("planning failed (ValueError('no room'))") == 1
    assert server.state.steps_host == {"planning failed": 2}


def test_a_kernel_that_fails_is_not_tried_again(server: Any, caplog, monkeypatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(server.attention, "run", fail)
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    for layer_id in range(2):
        server.backend.forward(q, k, v, make_layer(layer_id=layer_id), batch)
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["metadata", "decode", "decode", "metadata"]
    assert caplog.text.count("a kernel failed") == 1
    assert server.state.steps_host == {"kernel failed": 1}


def test_members_are_the_hosts(server: Any, host: Any) -> None:
    """Those that only the host's backend has, and those that its base class defines, too."""
    backend = server.backend
    assert isinstance(backend, host.AttentionBackend)
    assert backend.extra == "of the host"
    assert backend.support_triton() is False
    assert backend.needs_cpu_seq_lens is True  # ours: the forest needs them
    backend.prefill_attention_backend_str = "triton"
    assert backend._host.prefill_attention_backend_str == "triton"
    assert backend.prefill_attention_backend_str == "triton"
    with pytest.raises(AttributeError, match="no_such_member"):
        _ = backend.no_such_member
    with pytest.raises(NotImplementedError):  # the host's base class says so
        backend.init_cuda_graph_state(1, 1)


# -- arguments -----------------------------------------------------------------------------------


def make_arguments(**changes: Any) -> Any:
    arguments = SimpleNamespace(
        attention_backend="deft", prefill_attention_backend=None, decode_attention_backend=None,
        speculative_draft_attention_backend=None, device="cpu", kv_cache_dtype="auto",
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")),
        get_model_config=lambda: SimpleNamespace(is_encoder_decoder=False, is_hybrid_swa=False),
        use_mla_backend=lambda: False,
    )  # fmt: skip
    made = SimpleNamespace(**{**vars(arguments), **changes})
    made.get_attention_backends = lambda: (
        made.prefill_attention_backend or made.attention_backend,
        made.decode_attention_backend or made.attention_backend,
    )
    return made


def resolve_as_host(made: Any) -> None:
    assert "deft" not in (made.attention_backend, made.decode_attention_backend)
    made.attention_backend = made.attention_backend or "torch_native"


@pytest.fixture
def arguments(host: Any, monkeypatch) -> Any:
    from deft_backend.config import VARIABLES
    from deft_backend.hosts.sglang import arguments

    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    return arguments


@pytest.mark.parametrize("name", ["attention_backend", "decode_attention_backend"])
def test_the_host_resolves_as_if_the_flag_were_not_there(arguments: Any, name: str) -> None:
    made = make_arguments(**{"attention_backend": None, name: "deft"})
    arguments.resolve(resolve_as_host, made)
    assert made.attention_backend == "torch_native"
    assert made.decode_attention_backend is None
    assert getattr(made, arguments.HOST_DECODE) == "torch_native"
    assert made.cuda_graph_config.decode.backend == "disabled"


def test_servers_that_do_not_ask_are_left_alone(arguments: Any, monkeypatch) -> None:
    monkeypatch.setenv("DEFT_POLICY", "nonsense")
    made = make_arguments(attention_backend="triton")
    arguments.resolve(resolve_as_host, made)
    assert made.attention_backend == "triton"
    assert not hasattr(made, arguments.HOST_DECODE)
    assert made.cuda_graph_config.decode.backend == "full"


def test_a_wrong_setting_stops_the_server(arguments: Any, monkeypatch) -> None:
    monkeypatch.setenv("DEFT_MIN_BATCH", "none")
    with pytest.raises(SettingsError, match="DEFT_MIN_BATCH is 'none'; expected an integer"):
        arguments.resolve(resolve_as_host, make_arguments())


def test_the_fallback_backend(arguments: Any, monkeypatch) -> None:
    monkeypatch.setenv("DEFT_FALLBACK_BACKEND", "triton")
    made = make_arguments()
    arguments.resolve(resolve_as_host, made)
    assert made.attention_backend == getattr(made, arguments.HOST_DECODE) == "triton"
    for wrong in ("deft", "fastest"):
        monkeypatch.setenv("DEFT_FALLBACK_BACKEND", wrong)
        with pytest.raises(SettingsError, match=f"DEFT_FALLBACK_BACKEND is '{wrong}'; .*triton"):
            arguments.resolve(resolve_as_host, make_arguments())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "xpu"}, "device xpu"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_deterministic_inference": True}, "deterministic inference"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"dcp_size": 2}, "context parallelism"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "quantized KV caches"),
        ({"use_mla_backend": lambda: True}, "MLA"),
        ({"get_model_config": lambda: SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"get_model_config": lambda: SimpleNamespace()}, "was made for"),
    ],
)
def test_servers_that_are_not_supported_run_on_the_hosts_own(
    arguments: Any, caplog, changes: dict[str, Any], reason: str
) -> None:
    made = make_arguments(**changes)
    arguments.resolve(resolve_as_host, made)
    assert made.attention_backend == "torch_native"
    assert not hasattr(made, arguments.HOST_DECODE)
    assert made.cuda_graph_config.decode.backend == "full"
    (record,) = caplog.records
    assert reason in record.message
    assert "torch_native" in record.message


def test_this_host_has_what_the_patches_look_for(host: Any) -> None:
    from deft_backend.patches import sglang_capture_batch, sglang_resolve_arguments

    assert sglang_resolve_arguments.missing() is None
    assert sglang_capture_batch.missing() is None


def test_a_host_that_looks_different_is_said(host: Any, monkeypatch) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

    from deft_backend.patches import sglang_capture_batch, sglang_resolve_arguments

    monkeypatch.setattr(ForwardBatch, "init_new", classmethod(lambda cls, runner: None))
    assert "init_new takes" in str(sglang_capture_batch.missing())
    monkeypatch.setattr(ServerArgs, "resolve_once", lambda self: None, raising=False)
    assert "resolves in resolve_once" in str(sglang_resolve_arguments.missing())


def test_registering_never_raises(host: Any, monkeypatch, caplog) -> None:
    from deft_backend.hosts.sglang import plugin

    def fail() -> None:
        raise RuntimeError("a host from another planet")

    monkeypatch.setattr(plugin, "_register", fail)
    plugin.register()
    assert "a host from another planet" in caplog.text


@pytest.mark.parametrize("max_batch", [1, 20, 256])
def test_warm_up_runs_every_tile_that_fits(host: Any, max_batch: int) -> None:
    from deft_backend.attention import TreeAttention
    from deft_backend.hosts.sglang.factory import _warm_up

    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
        max_batch=max_batch, policy="deft-node",
    )  # fmt: skip
    pool = FakePool()
    pool.start_layer = 0  # type: ignore[attr-defined]
    _warm_up(attention, SimpleNamespace(token_to_kv_pool=pool))
    plan = attention.last_plan
    assert plan is not None
    tiles = sum(int(count > 0) for count in np.diff(plan.tile_ptr))
    assert tiles == {1: 1, 20: 1, 256: 4}[max_batch]

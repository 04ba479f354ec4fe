"""Accepted draft tokens, from what vLLM's scheduler tells its workers."""

import random
import sys
from types import SimpleNamespace

import pytest
from vllm.v1.worker.worker_base import WorkerWrapperBase

from deft_backend.hosts.vllm import server
from deft_backend.hosts.vllm.server import AcceptedDrafts
from deft_patches.vllm import observe_steps, tree_graphs
from failure_lines import raising
from sglang_fakes import make_state
from vllm_fakes import make_config, speculating


@pytest.fixture(autouse=True)
def observers(monkeypatch):
    """Leave no observer behind, nor the wrapper."""
    monkeypatch.setattr(WorkerWrapperBase, "execute_model", WorkerWrapperBase.execute_model)
    yield
    observe_steps._observers.clear()


def message(steps, finished=frozenset(), resumed=frozenset(), new=0):
    """A step: for each request, tokens computed before, tokens scheduled, and drafts of these."""
    return SimpleNamespace(
        finished_req_ids=finished,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(steps),
            resumed_req_ids=resumed,
            num_computed_tokens=[computed for computed, _, _ in steps.values()],
        ),
        num_scheduled_tokens={name: tokens for name, (_, tokens, _) in steps.items()},
        scheduled_spec_decode_tokens={
            name: [-1] * drafts for name, (_, _, drafts) in steps.items() if drafts
        },
    )


def test_a_request_by_hand():
    accepted = AcceptedDrafts(late=0)
    for step, counts in (
        ({"a": (40, 60, 0)}, (0, 0)),  # a piece of its prompt
        ({"a": (100, 1, 0)}, (0, 0)),
        ({"a": (101, 5, 4)}, (0, 0)),
        ({"a": (104, 5, 4), "b": (7, 1, 0)}, (1, 2)),
        ({"a": (105, 3, 2), "b": (8, 4, 3)}, (2, 2)),
        ({"a": (108, 1, 0), "b": (12, 4, 3)}, (4, 7)),
    ):
        accepted.observe(message(step))
        assert accepted.read() == counts
    accepted.observe(message({"b": (0, 12, 0)}, finished={"a"}, resumed={"b"}))
    accepted.observe(message({"b": (12, 4, 3)}))
    assert accepted.read() == (4, 7)
    assert list(accepted._open) == ["b"]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_many_requests_with_results_in_time_and_late(late, seed):
    """A scheduler counts on all drafts, and takes back the rejected ones when it knows them."""
    rng = random.Random(seed)
    accepted = AcceptedDrafts(late)
    computed = {f"r{i}": rng.randrange(10, 90) for i in range(7)}
    unknown = {name: [] for name in computed}
    drafts = taken = 0
    for _ in range(300):
        steps = {}
        for name in computed:
            if rng.random() < 0.2:
                continue  # it has no place in this step
            while len(unknown[name]) > late:
                drafted, kept = unknown[name].pop(0)
                computed[name] -= drafted - kept
                drafts, taken = drafts + (drafted > 0), taken + kept
            drafted = rng.choice([0, 3, 4])
            steps[name] = (computed[name], 1 + drafted, drafted)
            computed[name] += 1 + drafted
            unknown[name].append((drafted, rng.randint(0, drafted)))
        accepted.observe(message(steps))
    assert accepted.read() == (drafts, taken)
    assert taken > drafts > 300


def test_a_worker_shows_its_steps(caplog):
    worker = object.__new__(WorkerWrapperBase)
    worker._apply_mm_cache = lambda step: None
    seen = []

    def execute_model(step):
        seen.append(f"step {step}")
        return f"result of {step}"

    worker.worker = SimpleNamespace(execute_model=execute_model)
    assert observe_steps.missing() is None

    def last(step):
        observe_steps.remove(last)
        raise ValueError("by itself")

    for observer in (raising(ValueError("too many")), last, seen.append):
        observe_steps.install(observer)
    assert [worker.execute_model(step) for step in ("a", "b")] == ["result of a", "result of b"]
    assert seen == ["a", "step a", "b", "step b"]  # the step needs what the observer found
    assert [caplog.text.count(error) for error in ("too many", "by itself")] == [1, 1]


def test_the_next_server_of_a_process_counts_alone(monkeypatch):
    monkeypatch.setattr(server, "_current", None)
    for _ in range(2):
        config = make_config(speculative_config=speculating(4))
        made = server.server_of(config)
        state = make_state()
        made.drafts = server._count_drafts(state, config)
    assert made.drafts is not None
    assert observe_steps._observers == [made.drafts.observe]
    assert state.read_drafts == made.drafts.read


def test_what_is_not_counted(caplog):
    assert server._count_drafts(make_state(), make_config()) is None
    config = make_config(speculative_config=speculating(4), pipeline_parallel_size=2)
    assert server._count_drafts(make_state(), config) is not None
    config.scheduler_config.async_scheduling = True
    assert server._count_drafts(make_state(), config) is None
    assert "does not count accepted draft tokens: pipeline stages" in caplog.text


@pytest.mark.parametrize(
    ("patch", "module"),
    [
        (observe_steps, "vllm.v1.worker.worker_base"),
        (tree_graphs, "vllm.v1.worker.gpu.cudagraph_utils"),
    ],
)
def test_a_version_without_the_patched_module_lacks_it(patch, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert module in patch.missing()

"""The patch that shows vLLM's scheduler messages to observers."""

from types import SimpleNamespace

import pytest
from vllm.v1.worker.worker_base import WorkerWrapperBase

from deft_patches.vllm import observe_steps
from failure_lines import raising


@pytest.fixture(autouse=True)
def observers(monkeypatch):
    """Leave no observer behind, nor the wrapper."""
    monkeypatch.setattr(WorkerWrapperBase, "execute_model", WorkerWrapperBase.execute_model)
    yield
    observe_steps._observers.clear()


def test_a_worker_shows_its_steps(caplog):
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

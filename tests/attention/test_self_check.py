"""The self-check passes sound kernels and catches planted faults; it names the case and the row."""

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from attention_checks import tree_attention as heads_of_four
from deft_backend.attention import Gpu, self_check, tree_attention
from deft_backend.attention.self_check import Case, Outcome, check_shapes, checked, first_failure
from deft_backend.compile.triton_kernel import Kernel
from deft_backend.compile.variants import compile_all, compiling_for, recorded

DECODE = Case(on_device=False)


def attention_of(**changed):
    given = {"dtype": torch.float16, "page_size": 16, "max_batch": 8, "query_tokens": 3}
    return heads_of_four(**(given | changed))


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        (DECODE, {}),
        (Case(on_device=True), {"kv_dtype": torch.float8_e5m2}),
        (Case(True, 3, trees=True, ragged=True), {"dtype": torch.bfloat16}),
        (Case(False, 3, soft_cap=True, sinks=torch.float32), {"page_size": 1, "max_batch": 2}),
    ],
    ids=str,
)
def test_sound_kernels_pass(case, changed):
    outcome = checked(attention_of(**changed), case)
    assert outcome.failure is None
    assert outcome.error > 0.0


def test_layouts_of_a_server():
    """Slots of a page size of 1 in [slots, heads, D], and K and V interleaved."""
    attention = attention_of(page_size=1)
    held = torch.zeros(4, 2, 2, 64, dtype=torch.float16)
    tensors = self_check.HostTensors(held[:, 0], held[:, 1], [500], integers=torch.int64)
    strides = []
    run = attention.run

    def spy(q, k, v, table, lens, **rest):
        strides.append((k.stride(), v.stride(), table.shape[1], lens.dtype))
        return run(q, k, v, table, lens, **rest)

    attention.run = spy  # type: ignore[method-assign]
    assert first_failure(attention, [DECODE], tensors, 60.0) is None
    assert strides == [((256, 64, 1), (256, 64, 1), 500, torch.int64)]


@pytest.mark.parametrize(
    "fault",
    [
        lambda out: out[5].copy_(out[4]),
        lambda out: out[5, 1].mul_(1.03),
        lambda out: out[5].fill_(float("nan")),  # a row that nothing wrote
    ],
)
def test_a_wrong_row_is_found(fault, monkeypatch):
    run_plan = tree_attention.run_plan

    def wrong(config, plan, step, *rest, **named):
        run_plan(config, plan, step, *rest, **named)
        fault(step.out)

    monkeypatch.setattr(tree_attention, "run_plan", wrong)
    outcome = checked(attention_of(), DECODE)
    assert outcome.failure.startswith("row 5 is off by")
    attention = attention_of()
    tensors = self_check.HostTensors.plain(attention)
    found = first_failure(attention, [DECODE, DECODE], tensors, 0.0)
    assert found is not None


def test_a_read_of_what_an_earlier_step_left_is_found(monkeypatch):
    """Stale results of the same case are right; only a poisoned workspace shows such a read."""
    run_plan = tree_attention.run_plan

    def reads_stale_slots(config, plan, step, partial, **named):
        stale = sum(part.double().sum() for part in partial)
        run_plan(config, plan, step, partial, **named)
        step.out[5] += (0.0 * stale).to(step.out.dtype)

    monkeypatch.setattr(tree_attention, "run_plan", reads_stale_slots)
    attention = attention_of()
    for part in attention._workspace:
        part.zero_()
    failure = checked(attention, DECODE).failure
    assert failure.startswith("row 5 is off by")


@triton.jit
def broken(x):
    x.no_such_operation()


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch):
    def launch(*arguments, **named):
        with compiling_for(90):
            broken.warmup(torch.float32, grid=(1,))

    monkeypatch.setattr(Kernel, "launch", launch)
    outcome = checked(attention_of(), DECODE)
    assert outcome.error is None
    assert "no_such_operation" in outcome.failure


def test_a_device_with_64_kib_of_shared_memory(monkeypatch):
    """Kernels are compiled for it, and loaded as Triton loads them: what is too large fails."""
    gpu = Gpu((9, 0), 132, 65 * 1024, 64 * 1024)
    launch = Kernel.launch

    def load(self, *arguments, **named):
        with recorded() as found:
            launch(self, *arguments, **named)
        with compiling_for(gpu.arch):
            (kernel,) = compile_all(found).kernels
        if kernel.metadata.shared > gpu.shared_per_program:
            raise OutOfResources(kernel.metadata.shared, gpu.shared_per_program, "shared memory")

    monkeypatch.setattr(Kernel, "launch", load)
    outcome = checked(attention_of(head_dim=128, compiled_for=gpu), DECODE)
    assert "OutOfResources" in outcome.failure
    assert "shared memory" in outcome.failure


def test_the_cases_of_shapes_and_the_end_of_their_time(monkeypatch):
    """The first shape's kernels run in every kind of step, with plans of both planners."""
    left = []
    monkeypatch.setattr(self_check.time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(self_check, "wait", lambda needed, most: left.append(most) or ((), [1]))
    shapes = [
        self_check.CheckedShape(4, 2, 64, torch.float16, kv)
        for kv in (torch.float16, torch.float8_e4m3fn)
    ]
    outcomes = list(check_shapes(shapes, torch.device("cpu"), until=9.0))
    assert left == [2.0] * len(outcomes)
    assert all(outcome == Outcome(outcome.case, None) for _, outcome in outcomes)
    first, second = (
        [str(outcome.case) for shape, outcome in outcomes if shape == each] for each in shapes
    )
    assert first == [
        f"{step}, planned on the {planner}"
        for planner in ("device", "CPU")
        for step in ("decode", "chain", "tree")
    ]
    assert second == [first[0], first[1], first[3]]


@pytest.mark.parametrize(
    ("gpu", "versions", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", ("3.6.0", "2.11.0+cu130"), None),
        ("NVIDIA H100 80GB HBM3", ("3.9.1", "2.14.1"), "H100 with Triton 3.9 and torch 2.14"),
        ("NVIDIA H200", ("3.7.1", "2.13.0"), "H200 with Triton 3.7 and torch 2.13"),
        ("NVIDIA L40S", ("3.6.0", "2.11.0"), "NVIDIA L40S"),
    ],
)
def test_what_has_recorded_results(gpu, versions, expected, monkeypatch):
    monkeypatch.setattr(self_check.triton, "__version__", versions[0])
    monkeypatch.setattr(self_check.torch, "__version__", versions[1])
    assert self_check.unrecorded(gpu) == expected

"""The options of ``python -m benchmarks kernel``, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deft_backend.cli.errors import fail

if TYPE_CHECKING:
    from benchmarks.kernel.measure_case import Setup
    from benchmarks.kernel.methods import Method
    from benchmarks.kernel.methods.ours import Ours
    from benchmarks.kernel.tree_workloads import Case, Workload

FAILED = 1
"""Exit code if there is no GPU, or if a result of deft is wrong or missing."""

_CPU_SETS = ("tiny",)


def chosen_workloads(
    sets: str | None,
    trees: list[str] | None,
    traces: Path | None,
    steps: int,
    device: str,
    quick: bool,
) -> list[Workload]:
    """The workloads of the chosen sets and trees.

    Raises
    ------
    WorkloadChoiceError, TraceError
        If a set is unknown, or a tree or recording cannot be read.
    """
    from benchmarks.kernel import tree_workloads as workloads
    from benchmarks.kernel.recorded_workloads import recorded_workloads
    from benchmarks.kernel.verified_workloads import verified_workloads

    if sets is not None:
        names = words(sets)
    elif trees:
        names = []
    elif device == "cpu":
        names = list(_CPU_SETS)
    else:
        names = [name for name in workloads.set_names() if name not in _CPU_SETS]
        names += [workloads.TRACES] if traces is not None else []
    if workloads.TRACES in names and traces is None:
        raise fail(
            "the set 'traces' needs recordings; name their file or folder with --traces PATH"
        )
    if traces is not None and not {workloads.TRACES, workloads.VERIFY} & set(names):
        raise fail(
            f"--traces is {traces}, but the set 'traces' is not selected; add it to --set, or add "
            "'verify'"
        )
    found = [workloads.described(tree) for tree in trees or []]
    for name in dict.fromkeys(names):
        if name == workloads.TRACES:
            assert traces is not None
            found += recorded_workloads(traces, steps)
            continue
        is_verify = name == workloads.VERIFY
        listed = verified_workloads(traces) if is_verify else workloads.workloads_of(name)
        if device == "cpu" and name not in _CPU_SETS:
            raise fail(
                f"--set is {name!r}, which takes hours in Triton's interpreter; expected "
                f"{', '.join(_CPU_SETS)}, or small trees with --tree"
            )
        found += workloads.quick(listed) if quick and name not in _CPU_SETS else listed
    if not found:
        raise fail("nothing is selected; name a set with --set or a tree with --tree")
    return found


def chosen_methods(
    policy: str, planner: str, peers: str, as_on: str | None, device: str
) -> tuple[Ours, list[Method]]:
    """Our method, and the peers by name.

    `as_on` is a GPU whose configuration of the plain kernels runs on this one.

    Raises
    ------
    PolicyError
        If the policy is unknown.
    """
    from benchmarks.kernel.methods import OURS, PEERS, make_method
    from benchmarks.kernel.methods.ours import PLANNERS, Ours

    one_of("--planner", planner, PLANNERS)
    if as_on is not None:
        from deft_backend.kernels import Gpu

        one_of("--kernels-of", as_on, [name for name in Gpu.names() if name != "sm_90"])
        if device == "cpu":
            raise fail("--kernels-of needs a GPU; with --device cpu the interpreter's kernels run")
    names = [] if peers == "none" else list(dict.fromkeys(words(peers)))
    for name in names:
        one_of("--peers", name, (*PEERS, "none"))
    return Ours(OURS, policy, planner, as_on), [make_method(name) for name in names]


def chosen_policies(policies: str, planner: str) -> tuple[Ours, list[Method]]:
    """Our method with the first of these policies, and one method for each other policy.

    ``all`` are all policies, `auto` first.

    Raises
    ------
    PolicyError
        If a policy is unknown.
    """
    from benchmarks.kernel.methods import OURS
    from benchmarks.kernel.methods.ours import PLANNERS, Ours
    from deft_backend.policies import POLICY_NAMES

    one_of("--planner", planner, PLANNERS)
    names = list(dict.fromkeys(words(policies)))
    if names == ["all"]:
        names = list(reversed(POLICY_NAMES))
    first, *others = names
    return Ours(OURS, first, planner), [Ours(name, name, planner) for name in others]


def chosen_part(cases: list[Case], part: str | None) -> list[Case]:
    """Every Nth case from the Ith on, for a `part` of ``I/N``."""
    if part is None:
        return cases
    try:
        index, count = (int(number) for number in part.split("/"))
        if not 1 <= index <= count:
            raise ValueError
    except ValueError:
        raise fail(f"--part is {part!r}; expected I/N such as 1/3, I from 1 to N") from None
    kept = cases[index - 1 :: count]
    if not kept:
        raise fail(f"--part is {part!r}, but there are only {len(cases)} cases; choose a lower N")
    return kept


def make_setup(
    ours: Ours,
    peers: Sequence[Method],
    head_dim: int,
    dtype: str,
    device: str,
    layout: str,
    seed: int,
    eager: bool,
    quick: bool,
    phases: bool = False,
    kv_dtype: str = "same",
) -> Setup:
    """The settings of all cases; measures the device's ceilings."""
    import torch

    from benchmarks.kernel.measure_case import DTYPES, Setup
    from deft_backend.kernels import HEAD_DIMS
    from deft_backend.tools.tuning.launch_clock import QUICK, Budget, measure_ceilings

    if head_dim not in HEAD_DIMS:
        raise fail(f"--head-dim is {head_dim}; expected one of {', '.join(map(str, HEAD_DIMS))}")
    on_gpu = device == "cuda"
    where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    reasons = {method.name: method.unavailable(where) for method in peers}
    return Setup(
        ours=ours,
        peers=[method for method in peers if reasons[method.name] is None],
        head_dim=head_dim,
        dtype=dtype,
        device=where,
        layout=layout,
        seed=seed,
        graph=on_gpu and not eager,
        budget=QUICK if quick else Budget(),
        ceilings=measure_ceilings(DTYPES[dtype]) if on_gpu else None,
        unavailable={name: reason for name, reason in reasons.items() if reason is not None},
        phases=phases and on_gpu,
        kv_dtype=kv_dtype,
    )


def require_device(device: str, quick: bool) -> None:
    """Refuse to time anything on a machine without an NVIDIA GPU."""
    if device == "cpu":
        if not quick:
            raise fail("--device is 'cpu', where nothing is timed; add --quick to check results")
        return
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise fail(
            "the kernel benchmark needs an NVIDIA GPU, and torch finds none; to check results "
            "without times: --device cpu --quick"
        )


def parse_page_size(text: str) -> int | None:
    """Tokens per page; None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise fail(f"--page-size is {text!r}; expected auto or a number of tokens such as 1 or 16")
    return int(text)


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not allowed."""
    if value not in allowed:
        raise fail(f"{option} is {value!r}; expected one of {', '.join(allowed)}")


def words(text: str) -> list[str]:
    """The words between the commas."""
    return [word.strip() for word in text.split(",")]

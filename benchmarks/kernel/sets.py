"""The sets of ``sets.json``: the trees of each, and what they are measured with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernel.mixed_forests import mixed_forest
from benchmarks.kernel.tree_workloads import (
    Workload,
    WorkloadChoiceError,
    described,
    forest_from_parents,
    parse_heads,
    quick,
)
from benchmarks.kernel.verified_workloads import verified_workloads
from benchmarks.papers.workloads import drafted, few_shot, prompts, recorded, thoughts, token_trees
from deft_backend.tools.traces.tree_forests import forest_from_levels

OWN = "own"
"""The set of trees that the user describes."""


@dataclass(frozen=True)
class Spec:
    """How a set is measured.

    - `heads`: query and KV heads, such as ``32/8``, of each case.
    - `page_size`: tokens a page; 0: 16 if all nodes are whole pages of 16 tokens, otherwise 1.
    - `layout`: pages shuffled in a larger pool, or contiguous.
    - `policy`, `planner`: of tree attention. With the planner ``device``, the attention makes every
      kernel launch that a server's CUDA graph holds.
    - `kernels_of`: a GPU such as ``sm_80``: the plain kernels run as on it, with the SMs of the one
      here.
    - `peers`: methods to compare with (:mod:`benchmarks.kernel.methods`).
    - `steps`: steps of each recorded tree.
    - `place`, `claim`: of a paper's table or figure. The steps of one workload are then averaged.
    """

    name: str = OWN
    heads: tuple[str, ...] = ("32/8",)
    head_dim: int = 128
    dtype: str = "fp16"
    kv_dtype: str = "same"
    page_size: int = 0
    layout: str = "shuffled"
    policy: str = "auto"
    planner: str = "host"
    kernels_of: str = ""
    peers: tuple[str, ...] = ("flashinfer", "cascade", "fa3", "fa3-cascade", "flash-decoding")
    seed: int = 0
    steps: int = 6
    place: str = ""
    claim: str = ""

    def overridden(self, words: Sequence[str]) -> Spec:
        """The spec with ``KEY=VALUE`` words in place of its own; raises WorkloadChoiceError."""
        kinds = {each.name: type(getattr(self, each.name)) for each in fields(self)}
        changed: dict[str, Any] = {}
        for word in words:
            key, given, value = word.partition("=")
            if not given or key not in kinds or key in ("name", "place", "claim"):
                known = ", ".join(kinds)
                raise WorkloadChoiceError(f"--with is {word!r}; expected KEY=VALUE of {known}")
            try:
                kind = kinds[key]
                changed[key] = tuple(value.split(",")) if kind is tuple else kind(value)
            except ValueError:
                raise WorkloadChoiceError(f"--with is {word!r}; expected a number") from None
        for text in changed.get("heads", ()):
            parse_heads(text)
        return replace(self, **changed)


SETS: dict[str, Any] = json.loads(Path(__file__).with_name("sets.json").read_text())


def read_set(
    name: str, traces: Path | None, words: Sequence[str] = ()
) -> tuple[Spec, list[Workload]]:
    """A set's spec, with the user's ``KEY=VALUE`` words, and its workloads.

    Raises WorkloadChoiceError or TraceError if there is no such set, or it needs recordings.
    """
    if name not in SETS:
        raise WorkloadChoiceError(
            f"there is no set {name!r}; expected one or more of {', '.join(SETS)}, separated by "
            "commas"
        )
    entry = dict(SETS[name])
    trees, source = entry.pop("trees", []), entry.pop("of", [])
    entry.pop("source", None)
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    spec = Spec(name=name, **{**entry, **lists}).overridden(words)
    found = [workload for of in source for workload in read_set(of, traces)[1]]
    for tree in trees:
        found += _workloads(name, tree, traces, spec)
    return spec, found


def own_trees(trees: Sequence[str], words: Sequence[str]) -> tuple[Spec, list[Workload]]:
    """The user's trees as a set; raises WorkloadChoiceError or TraceError."""
    return Spec().overridden(words), [described(tree) for tree in trees]


def _workloads(
    name: str, entry: str | Mapping[str, Any], traces: Path | None, spec: Spec
) -> list[Workload]:
    """One entry of ``trees``: a tree, or the name of a family with its numbers."""
    if isinstance(entry, str):
        return [Workload(name, entry, partial(forest_from_levels, entry))]
    if "name" in entry:
        page_size = entry.get("page_size")
        if "tree" in entry:
            describe: Callable[..., Any] = partial(forest_from_levels, entry["tree"])
        elif "parents" in entry:
            describe = partial(forest_from_parents, entry["parents"], entry["tokens"])
        else:
            describe = partial(mixed_forest, **entry["mixed"])
        return [Workload(name, entry["name"], describe, page_size)]
    ((family, numbers),) = entry.items()
    if family == "few_shot":
        return few_shot(numbers)
    if family == "prompts":
        return prompts(*numbers)
    if family == "trees_of":
        return [
            replace(w, set=w.name)
            for w in read_set(numbers[0], traces)[1]
            if len(numbers) == 1 or w.name in numbers[1:]
        ]
    if family == "chains":
        return verified_workloads(traces)
    if traces is None:
        raise WorkloadChoiceError(
            f"the set {name!r} needs recordings; name their file or folder with --traces PATH"
        )
    if family == "recorded":
        return recorded(traces, spec.steps)
    if family == "drafted":
        return [replace(each, set=name) for each in drafted(thoughts(traces), **numbers)]
    if family == "thoughts":
        found = thoughts(traces, **numbers)
        return [replace(w, set=w.name) for w in found] if name == "deft-iterations" else found
    return token_trees(traces, **numbers)


def chosen(
    names: Sequence[str],
    trees: Sequence[str],
    traces: Path | None,
    words: Sequence[str],
    *,
    short: bool,
) -> list[tuple[Spec, list[Workload]]]:
    """The chosen sets and the user's trees; `short`: two trees of each, and of each recording.

    Raises WorkloadChoiceError or TraceError.
    """
    words = [*words, "steps=2"] if short else list(words)
    found = [own_trees(trees, words)] if trees else []
    found += [read_set(name, traces, words) for name in names]
    if short:
        found = [(spec, quick(workloads)) for spec, workloads in found]
    return found

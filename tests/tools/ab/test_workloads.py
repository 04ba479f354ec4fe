"""Workloads: equal requests on every machine, and the sharing that each one promises."""

import itertools
import os
import subprocess
import sys

import pytest

from deft_backend.tools.ab.workloads import (
    WORKLOADS,
    Sizes,
    document_questions,
    few_shot,
    make_workloads,
    parallel_samples,
    tree_of_thoughts,
    unshared,
)
from deft_backend.tools.traces.thought_trees import ThoughtTree, lay_out

SMALL = Sizes(4, 300, 8)


def test_workloads_are_the_same_in_another_process():
    script = (
        "import hashlib; from deft_backend.tools.ab.workloads import *;"
        f"made = make_workloads(WORKLOADS, {SMALL});"
        "print(hashlib.sha256(repr(made).encode()).hexdigest())"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(subprocess.check_output([sys.executable, "-c", script], env=environment))
    assert len(seen) == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_decodes_what_was_asked_for(name):
    (workload,) = make_workloads([name], SMALL)
    assert workload.name == name
    assert all(1 <= request.max_tokens <= SMALL.max_tokens for request in workload.requests)
    assert workload.tokens == sum(r.max_tokens for r in workload.requests)


def test_few_shot_branches_share_the_warm_prompt_and_then_differ():
    workload = few_shot(5, 300, 24)
    assert all(r.prompt.startswith(workload.warm[0]) for r in workload.requests)
    assert len({r.prompt for r in workload.requests}) == len(workload.requests) == 5


def test_parallel_samples_have_one_prompt():
    requests = parallel_samples(7, 600, 24).requests
    assert (len(requests), {request.prompt for request in requests}) == (7, {requests[0].prompt})


def test_document_questions_share_two_levels():
    workload = document_questions(3, 4, 200, 24)
    assert len(workload.requests) == 12
    assert len({text[:20] for text in workload.warm}) == 1  # the instruction
    for text in workload.warm:
        assert sum(r.prompt.startswith(text) for r in workload.requests) == 4


def test_unshared_prompts_share_nothing():
    workload = unshared(9, 300, 24)
    heads = [r.prompt for r in workload.requests]
    assert workload.warm == ()
    assert all(a[0] != b[0] for a, b in itertools.combinations(heads, 2))


def test_tree_of_thoughts_follows_its_tree():
    # Thought 2 is empty, so its child continues from the prompt.
    children = {0: (1, 2), 1: (3, 4), 2: (5,), 3: (), 4: (), 5: ()}
    nodes = lay_out({0: 20, 1: 5, 2: 0, 3: 3, 4: 2, 5: 4}, children)
    workload = tree_of_thoughts(ThoughtTree("p" * 20, nodes))
    found = {r.name: (r.after, r.max_tokens) for r in workload.requests}
    assert found == {
        "thought 1": (None, 5),
        "thought 3": ("thought 1", 3),
        "thought 4": ("thought 1", 2),
        "thought 5": (None, 4),
    }
    assert workload.warm == ("p" * 20,)
    siblings = [r.prompt for r in workload.requests if r.after == "thought 1"]
    assert len(set(siblings)) == 2
    assert all(r.prompt.startswith("p" * 20) for r in workload.requests if r.after is None)

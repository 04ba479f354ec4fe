"""Workloads: equal requests on every machine, and the sharing that each one promises."""

import os
import subprocess
import sys

import pytest

from deft_backend.tools.ab.workloads import WORKLOADS, Sizes, make_workloads, tree_of_thoughts
from deft_backend.tools.harness.answers import first_difference
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


def shared(name, *sizes):
    """A workload, and how many leading characters each request has in common with the first."""
    (workload,) = make_workloads([name], Sizes(*sizes))
    texts = [request.prompt for request in workload.requests]
    assert len(set(texts)) == len(texts)
    common = [first_difference(texts[0], text) for text in texts]
    return workload, [len(texts[0]) if at is None else at for at in common]


def test_branches_samples_and_documents_share_what_they_promise():
    workload, common = shared("few-shot", 5, 300, 24)
    assert all(r.prompt.startswith(workload.warm[0]) for r in workload.requests)
    assert [len(workload.requests), len(workload.warm[0])] == [5, 300]
    assert min(common) >= 300
    (workload,) = make_workloads(["parallel-samples"], Sizes(7, 600, 24))
    assert [request.prompt for request in workload.requests] == [workload.warm[0]] * 7
    _, common = shared("document-questions", 7, 200, 24)
    assert [at >= 200 for at in common] == [True, False] * 3
    workload, common = shared("unshared", 9, 300, 24)
    assert (workload.warm, max(common[1:]) < 20) == ((), True)
    assert {len(r.prompt) for r in workload.requests} == {150}


def test_fasttrees_programs_share_in_text_what_they_share_in_ids():
    """One of each level in turn: 45 of 2,600 characters, 400, and all of them."""
    _, common = shared("system-prompts", 8, 2600, 24)
    assert [common[4] >= 2600, 400 <= common[1] < 2600, 45 <= common[2] < 400] == [True] * 3
    workload, common = shared("chains", 8, 300, 24)
    assert [len(workload.requests), workload.requests[4].after] == [10, "question 0, chain 0"]
    assert len(workload.requests[4].returned) == 3
    assert min(common[1:4]) >= 360 > common[5] >= 300
    _, common = shared("retrieved", 16, 400, 24)
    assert common[2] >= 400 > common[1]


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

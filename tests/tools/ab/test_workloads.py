"""Workloads: equal requests on every machine, and the sharing that each one promises."""

import itertools
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deft_backend.tools.ab.workloads import (
    WORKLOADS,
    Sizes,
    check_fits,
    default_sizes,
    document_questions,
    few_shot,
    make_workloads,
    parallel_samples,
    tree_of_thoughts,
    unshared,
)
from deft_backend.tools.harness.workload import Request, Workload, WorkloadError
from deft_backend.tools.traces.invented import passage, question
from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree, lay_out
from deft_backend.tools.traces.trace_files import Arrival

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


@given(st.integers(1, 3000), st.integers(0, 50))
def test_passages_are_exactly_as_long_as_asked_for(size, seed):
    assert len(passage(size, seed).encode()) == size


def test_neighbouring_questions_differ():
    notes = passage(300, 1)
    asked = [question(branch, notes) for branch in range(60)]
    assert len(set(asked)) == len(asked)


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


def test_tree_of_thoughts_follows_the_recorded_tree():
    # Thought 2 was recorded as empty, so its child continues from the prompt.
    children = {0: (1, 2), 1: (3, 4), 2: (5,), 3: (), 4: (), 5: ()}
    nodes = lay_out({0: 20, 1: 10, 2: 0, 3: 6, 4: 4, 5: 8}, children)
    workload = tree_of_thoughts(ThoughtTree("p" * 20, False, nodes), 0.5)
    found = {r.name: (r.after, r.max_tokens) for r in workload.requests}
    assert found == {
        "thought 1": (None, 5),
        "thought 3": ("thought 1", 3),
        "thought 4": ("thought 1", 2),
        "thought 5": (None, 4),
    }
    assert workload.warm == ("p" * 10,)
    siblings = [r.prompt for r in workload.requests if r.after == "thought 1"]
    assert len(set(siblings)) == 2
    assert all(r.prompt.startswith("p" * 10) for r in workload.requests if r.after is None)


def test_trees_without_thoughts_are_refused():
    for nodes in ({}, lay_out({ROOT: 3}, {ROOT: ()})):
        with pytest.raises(WorkloadError, match="the trace's tree holds"):
            tree_of_thoughts(ThoughtTree("abc", True, nodes), 1.0)
    tree = ThoughtTree("abc", False, lay_out({ROOT: 3, 1: 2}, {ROOT: (1,), 1: ()}))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="scale"):
            tree_of_thoughts(tree, scale)


def test_bad_names_are_quoted():
    with pytest.raises(WorkloadError, match="unknown 'b'"):
        Workload("w", "", (), (Request("a", "x", 1, after="b"),))


def test_quick_is_smaller():
    for gpu in (True, False):
        quick, full = (default_sizes(on_gpu=gpu, quick=q) for q in (True, False))
        assert quick.branches < full.branches
        assert quick.max_tokens < full.max_tokens


@pytest.mark.parametrize(
    ("names", "prefix", "said"),
    [
        (["few-shot"], 16000, "no request of few-shot fits.*pass --prefix-tokens 7892 or less"),
        (["unshared"], 16000, None),  # half of the prefix: some of it fits
        (["few-shot", "unshared"], 8192, "no request of few-shot fits"),
        (["rollout"], 9000, "pass --prefix-tokens 6492 or less"),
        (["tree-of-thoughts"], 9000, "pass --prefix-tokens 7492 or less"),
        (["few-shot"], 8000, None),
    ],
)
def test_workloads_of_which_nothing_fits_are_refused(names, prefix, said):
    sizes = Sizes(64, prefix, 200)
    check_fits(names, sizes, [], None)
    if said is None:
        check_fits(names, sizes, [], 8192)
    else:
        with pytest.raises(WorkloadError, match=said):
            check_fits(names, sizes, [], 8192)


def test_a_prefix_that_the_message_names_fits():
    """Also with the longest answers, so that every request is answered."""
    for names in (["few-shot"], ["rollout"], ["tree-of-thoughts"]):
        with pytest.raises(WorkloadError) as error:
            check_fits(names, Sizes(8, 999_999, 40), [], 2000)
        most = int(re.findall("--prefix-tokens ([0-9]+)", str(error.value))[0])
        for made in make_workloads(names, Sizes(8, most, 40)):  # a character is a token
            longest = {None: 0}
            for each in made.requests:
                tokens = longest[each.after] + len(each.own_part()) + each.max_tokens
                longest[each.name] = tokens
            assert max(longest.values()) <= 2000


def test_a_context_too_small_for_any_answer():
    with pytest.raises(WorkloadError, match="pass fewer --max-tokens than 200 and fewer"):
        check_fits(["few-shot"], Sizes(8, 300, 200), [], 100)
    with pytest.raises(WorkloadError, match="shortest request of the trace has 500"):
        check_fits([], Sizes(8, 300, 200), [Arrival(0.0, 400, 100, (1,))], 450)

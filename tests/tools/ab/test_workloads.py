"""Workloads: equal plans on every machine, the stated sharing, and the comparison of answers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deft_backend.tools.ab.agreement import compare
from deft_backend.tools.ab.invented_text import passage, question
from deft_backend.tools.ab.sizes import Sizes, characters_a_token, default_sizes, make_plans
from deft_backend.tools.ab.workloads import (
    WORKLOADS,
    DocumentQuestions,
    FewShot,
    ParallelSamples,
    Request,
    RequestPlan,
    TreeOfThoughts,
    Unshared,
    WorkloadError,
)
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.send_plan import Answered
from deft_backend.tools.traces.recorded_trees import ThoughtTree
from deft_backend.tools.traces.trace_files import ROOT, lay_out

SMALL = Sizes(4, 300, 8)


def test_plans_are_the_same_in_another_process() -> None:
    script = (
        "import hashlib; from deft_backend.tools.ab.sizes import Sizes, make_plans;"
        "from deft_backend.tools.ab.workloads import WORKLOADS;"
        f"plans = make_plans(WORKLOADS, {SMALL});"
        "print(hashlib.sha256(repr(plans).encode()).hexdigest())"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(subprocess.check_output([sys.executable, "-c", script], env=environment))
    assert len(seen) == 1


@given(st.integers(1, 3000), st.integers(0, 50))
def test_passages_are_exactly_as_long_as_asked_for(size: int, seed: int) -> None:
    assert len(passage(size, seed).encode()) == size


def test_neighbouring_questions_differ() -> None:
    notes = passage(300, 1)
    asked = [question(branch, notes) for branch in range(60)]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_plan_decodes_what_was_asked_for(name: str) -> None:
    (plan,) = make_plans([name], SMALL)
    assert plan.workload == name
    assert all(1 <= request.max_tokens <= SMALL.max_tokens for request in plan.requests)
    assert plan.tokens == sum(r.max_tokens * r.n for r in plan.requests)


def test_few_shot_branches_share_the_warm_prompt_and_then_differ() -> None:
    plan = FewShot(branches=5, prefix_characters=300).plan()
    assert all(r.prompt.startswith(plan.warm[0]) for r in plan.requests)
    assert len({r.prompt for r in plan.requests}) == len(plan.requests) == 5


def test_parallel_samples_are_one_request() -> None:
    (request,) = ParallelSamples(samples=7).plan().requests
    assert request.n == 7


def test_document_questions_share_two_levels() -> None:
    plan = DocumentQuestions(documents=3, questions=4, prefix_characters=200).plan()
    assert len(plan.requests) == 12
    assert len({text[:20] for text in plan.warm}) == 1  # the instruction
    for text in plan.warm:
        assert sum(r.prompt.startswith(text) for r in plan.requests) == 4


def test_unshared_prompts_share_nothing() -> None:
    plan = Unshared(requests=9).plan()
    heads = [r.prompt for r in plan.requests]
    assert plan.warm == ()
    assert all(a[0] != b[0] for a, b in itertools.combinations(heads, 2))


def test_tree_of_thoughts_follows_the_recorded_tree() -> None:
    # Thought 2 was recorded as empty, so its child continues from the prompt.
    children = {0: (1, 2), 1: (3, 4), 2: (5,), 3: (), 4: (), 5: ()}
    nodes = lay_out({0: 20, 1: 10, 2: 0, 3: 6, 4: 4, 5: 8}, children)
    plan = TreeOfThoughts(ThoughtTree("p" * 20, False, nodes), scale=0.5).plan()
    found = {r.name: (r.after, r.max_tokens) for r in plan.requests}
    assert found == {
        "thought 1": (None, 5),
        "thought 3": ("thought 1", 3),
        "thought 4": ("thought 1", 2),
        "thought 5": (None, 4),
    }
    assert plan.warm == ("p" * 10,)
    siblings = [r.prompt for r in plan.requests if r.after == "thought 1"]
    assert len(set(siblings)) == 2
    assert all(r.prompt.startswith("p" * 10) for r in plan.requests if r.after is None)


def test_trees_without_thoughts_are_refused() -> None:
    for nodes in ({}, lay_out({ROOT: 3}, {ROOT: ()})):
        with pytest.raises(WorkloadError, match="the trace's tree holds"):
            TreeOfThoughts(ThoughtTree("abc", True, nodes)).plan()
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="scale"):
            TreeOfThoughts(scale=scale).plan()


def test_bad_sizes_and_names_are_quoted() -> None:
    with pytest.raises(WorkloadError, match="branches is 0"):
        FewShot(branches=0).plan()
    with pytest.raises(WorkloadError, match="branches=0"):
        make_plans(WORKLOADS, Sizes(0, 1, 1))
    with pytest.raises(WorkloadError, match=r"'chat'.*few-shot"):
        make_plans(["chat"], SMALL)
    with pytest.raises(WorkloadError, match="unknown 'b'"):
        RequestPlan("w", "", (), (Request("a", "x", 1, after="b"),))


def test_quick_is_smaller() -> None:
    for gpu in (True, False):
        quick, full = (default_sizes(on_gpu=gpu, quick=q) for q in (True, False))
        assert quick.branches < full.branches
        assert quick.max_tokens < full.max_tokens


def test_without_a_tokenizer_four_characters_make_a_token() -> None:
    assert characters_a_token(None) == 4.0


def answered(plan: RequestPlan, changed: tuple[str, int] | None = None) -> Answered:
    """Answers that count up; `changed` names an answer and its different token."""
    answers = []
    for request in plan.requests:
        for index in range(request.n):
            ids = list(range(request.max_tokens))
            if changed and changed[0] == request.name and index == 0:
                ids[changed[1]] += 100
            answers.append(
                Answer(
                    request.name,
                    index,
                    ids=ids,
                    tokens=["same text"] * len(ids),
                    logprobs=[-0.5] * len(ids),
                    top=[{"same text": -0.5, "another": -0.75}] * len(ids),
                    arrivals=[1.0 + t for t in ids],
                )
            )
    return Answered(plan, tuple(answers), 1.0)


def test_equal_answers_agree() -> None:
    plan = ParallelSamples(samples=3, max_tokens=5).plan()
    result = compare(answered(plan), answered(plan))
    assert (result.same, result.equal, result.tokens) == (True, 3, 15)


def test_the_first_difference_is_found_even_where_the_text_is_the_same() -> None:
    plan = FewShot(branches=3, max_tokens=5).plan()
    result = compare(answered(plan), answered(plan, ("branch 1", 2)))
    (divergence,) = result.divergences
    assert (divergence.answer, divergence.position, divergence.margin) == ("branch 1", 2, 0.25)
    assert (result.equal, result.tokens, result.same) == (2, 12, False)


def test_what_goes_on_from_a_difference_is_not_compared() -> None:
    requests = (
        Request("a", "x", 3),
        Request("b", "x", 3, after="a"),
        Request("c", "x", 3, after="b"),
        Request("d", "x", 3),
    )
    plan = RequestPlan("w", "", (), requests)
    result = compare(answered(plan), answered(plan, ("a", 0)))
    assert (result.equal, result.not_compared, len(result.divergences)) == (1, 2, 1)
    assert not result.same


def test_a_shorter_answer_is_a_difference() -> None:
    plan = FewShot(branches=1, max_tokens=5).plan()
    whole = answered(plan)
    cut = replace(
        whole, answers=(Answer("branch 0", 0, [0, 1], ["same text"] * 2, logprobs=[-0.5] * 2),)
    )
    (divergence,) = compare(whole, cut).divergences
    assert (divergence.position, divergence.deft_token) == (2, "(end)")


def samples(*texts: str) -> Answered:
    """Answers to one request; the likeliest two tokens are far apart at a capital letter."""
    plan = ParallelSamples(samples=len(texts), max_tokens=len(texts[0])).plan()
    answers = [
        Answer(
            "samples", index, list(map(ord, text)), list(text), text,
            [float(at) for at in range(len(text))], 0.0, [-0.1] * len(text),
            [{"?": -0.1, "!": -5.0 if letter.isupper() else -0.1} for letter in text],
        )
        for index, text in enumerate(texts)
    ]  # fmt: skip
    return Answered(plan, tuple(answers), 1.0)


@pytest.mark.parametrize("deft", [("abcD", "axyz", "axyz"), ("axyz", "axyz", "axyz")])
def test_samples_of_one_prompt_take_a_tie_in_any_order(deft: tuple[str, ...]) -> None:
    result = compare(samples("axyz", "abcD", "abcD"), samples(*deft))
    assert (result.same, result.equal, result.tokens) == (True, 3, 12)


def test_a_wrong_token_is_not_taken_for_the_tie_of_another_sample() -> None:
    """By index, the second answers part at the tie, and the wrong token behind it is not seen."""
    result = compare(samples("abcD", "axyz"), samples("axyz", "abcE"))
    (divergence,) = result.divergences
    assert (divergence.answer, divergence.position) == ("samples #1", 3)
    assert divergence.margin == pytest.approx(4.9)
    assert (result.equal, result.tokens) == (1, 7)


def test_different_plans_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="different plans"):
        compare(answered(FewShot().plan()), answered(Unshared().plan()))

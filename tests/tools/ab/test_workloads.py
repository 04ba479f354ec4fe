"""Workloads: equal requests on every machine, and the sharing that each one promises."""

import hashlib
from pathlib import Path

from deft_backend.tools.ab.workloads import (
    CHOICES,
    Sizes,
    default_sizes,
    make_workloads,
    tree_of_thoughts,
)
from deft_backend.tools.harness.answers import first_difference
from deft_backend.tools.traces.invented import passage, question
from deft_backend.tools.traces.thought_trees import ThoughtTree, generate_thought_tree, lay_out
from drawings import check_drawn

SMALL = Sizes(4, 300, 8)


def drawn(workload):
    """All of a workload; each prompt as its length, the digest of its text, and how many characters
    it has in common with the first request's.
    """
    texts = [request.own_part() for request in workload.requests]

    def text(own):
        common = first_difference(texts[0], own)
        return f"{len(own)}:{hashlib.sha256(own.encode()).hexdigest()[:8]}:{common}"

    yield f"# {workload.name}: {workload.description}; {workload.arrivals}; {workload.tokens}"
    yield " ".join(map(text, workload.warm))
    for r, own in zip(workload.requests, texts, strict=True):
        rest = (r.after, *r.returned, r.prompt_tokens, r.temperature)
        yield f"{r.name}: {text(own)} {r.max_tokens} {r.at:.4f} {rest}"


def test_workloads_are_as_drawn():
    """They are the same on every machine; each sum of sizes has an odd and a small part."""
    lines = []
    for sizes, ratio in ((SMALL, 1.0), (Sizes(17, 2601, 7), 3.7), (Sizes(1, 1, 1), 1.0)):
        for made in make_workloads(CHOICES, sizes, characters_a_token=ratio):
            lines += drawn(made)
        lines += drawn(made.arriving(2.5))
        lines += drawn(made.renewed(2))
    # Thought 2 is empty, so its child continues from the prompt.
    children = {0: (1, 2), 1: (3, 4), 2: (5,), 3: (), 4: (), 5: ()}
    nodes = lay_out({0: 20, 1: 5, 2: 0, 3: 3, 4: 2, 5: 4}, children)
    lines += drawn(tree_of_thoughts(ThoughtTree("p" * 20, nodes)))
    made = generate_thought_tree(
        5, width=3, keep=2, prompt_tokens=9, shortest=2, longest=4, characters_a_token=1.5
    )
    lines += [made.prompt, made.last_iteration, *made.nodes.values()]
    lines += [question(at, passage(90 + at, at))[2:] for at in range(8)]
    lines += [question(at, "")[2:] for at in (0, 23, 24, 48)]
    lines += [default_sizes(on_gpu=gpu, quick=quick) for gpu in (0, 1) for quick in (0, 1)]
    check_drawn("\n".join(map(str, lines)) + "\n", Path(__file__).with_name("workloads.txt"))

"""The sizes of `deft ab`'s workloads, chosen by the machine and by the user."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from deft_backend.tools.ab.workloads import (
    ROLLOUTS,
    document_questions,
    few_shot,
    parallel_samples,
    rollout,
    tree_of_thoughts,
    unshared,
)
from deft_backend.tools.harness.workload import Workload
from deft_backend.tools.traces.invented_tree import ThoughtTreeShape, generate_thought_tree
from deft_backend.tools.traces.recorded_trees import ThoughtTree


class Sizes(NamedTuple):
    """Concurrent requests, tokens of their shared prefix, and tokens that each decodes."""

    branches: int
    prefix_tokens: int
    max_tokens: int


def default_sizes(*, on_gpu: bool, quick: bool) -> Sizes:
    """Sizes for a run of minutes. On the CPU a step takes a large part of a second."""
    if on_gpu:
        return Sizes(16, 2000, 64) if quick else Sizes(32, 4000, 200)
    return Sizes(6, 400, 16) if quick else Sizes(8, 600, 24)


def make_workloads(
    names: Sequence[str],
    sizes: Sizes,
    *,
    characters_a_token: float = 1.0,
    tree: ThoughtTree | None = None,
    scale: float = 1.0,
) -> list[Workload]:
    """The workloads of these names, in the order given.

    - `sizes`: at least 1 each.
    - `names`: names from :data:`~deft_backend.tools.ab.workloads.CHOICES`.
    - `characters_a_token`: converts tokens to characters of the invented text.
    - `tree`: a recorded tree of thoughts; None for an invented one.
    - `scale`: multiplies the lengths of the recorded tree.

    Raises WorkloadError if the recorded tree cannot be replayed.
    """
    count, answer = sizes.branches, sizes.max_tokens
    characters = max(1, round(sizes.prefix_tokens * characters_a_token))
    if tree is None:
        shape = ThoughtTreeShape(
            width=max(1, min(count, 8) // 2), keep=2, prompt_tokens=sizes.prefix_tokens,
            shortest=max(1, answer // 2), longest=answer, characters_a_token=characters_a_token,
        )  # fmt: skip
        tree, scale = generate_thought_tree(shape), 1.0
    documents = 2 if count > 1 else 1
    makers: dict[str, Callable[[], Workload]] = {
        "few-shot": partial(few_shot, count, characters, answer),
        "parallel-samples": partial(parallel_samples, count, characters, answer),
        "document-questions": partial(
            document_questions, documents, count // documents, characters, answer
        ),
        "tree-of-thoughts": partial(tree_of_thoughts, tree, scale),
        "unshared": partial(unshared, count, max(1, characters // 2), answer),
        **{
            name: partial(rollout, samples, characters, 2 * answer)
            for name, samples in ROLLOUTS.items()
        },
    }
    return [makers[name]() for name in names]

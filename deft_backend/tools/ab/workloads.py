"""The workloads that `deft ab` replays: invented ones, the same on every machine, and traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

from deft_backend.tools.harness import programs as prompts
from deft_backend.tools.harness.programs import CHAINS, PROGRAMS, Make, levels
from deft_backend.tools.harness.workload import (
    Request,
    Workload,
    WorkloadError,
    poisson,
    thought_requests,
)
from deft_backend.tools.traces.arrivals import BLOCK_TOKENS, Arrival, shared_tokens
from deft_backend.tools.traces.invented import passage, question
from deft_backend.tools.traces.thought_trees import ThoughtTree, generate_thought_tree

WORKLOADS = ("few-shot", "parallel-samples", "document-questions", "tree-of-thoughts", "unshared")
"""The workloads that run if the user names none."""

CHOICES = (*WORKLOADS, "rollout", *PROGRAMS)


def samples(name: str, characters: int, lengths: Sequence[int]) -> Workload:
    """Samples of one prompt, with answers of these lengths."""
    notes = passage(characters, name)
    prompt = notes + question(0, notes)
    said = (
        f"{len(lengths)} samples of one prompt, answers of {min(lengths)} to {max(lengths)} tokens"
    )
    requests = tuple(Request(f"sample {at}", prompt, length) for at, length in enumerate(lengths))
    return Workload(name, said, (prompt,), requests)


def long_answers(count: int, mean_tokens: int) -> list[int]:
    """Lengths of answers as in RL: log-normal, up to four times the mean."""
    chance = random.Random("rollout 4")
    drawn = [mean_tokens * chance.lognormvariate(-0.2, 0.63) for _ in range(count)]
    return [max(1, min(round(length), 4 * mean_tokens)) for length in drawn]


def tree_of_thoughts(tree: ThoughtTree) -> Workload:
    """A tree: one request for each thought; its children start when it ends, with a line of their
    own, or greedy decoding would give all siblings the same answer.
    """
    requests = thought_requests(tree, tree.prompt, _mark)
    said = f"{len(requests)} thoughts, {tree.last_iteration} iterations"
    return Workload("tree-of-thoughts", said, (tree.prompt,), requests)


def in_text(name: str, make: Make, ratio: float, sizes: prompts.Sizes, answer: int) -> Workload:
    """A workload for prompts of text, with `ratio` characters a token."""
    number = count()

    def shared(tokens: int) -> str:
        return passage(round(tokens * ratio), f"{name} {next(number)}")

    def own(tokens: int) -> str:
        mark = _mark(next(number))
        return shared(tokens)[len(mark) :] + mark

    made = make(sizes, answer, prompts.Parts(shared, own))
    said = f"{len(made.requests)} requests, {sizes.prefix} tokens of a prompt shared"
    return replace(made, name=name, description=said)


def _mark(node: int) -> str:
    """A line that makes thoughts differ. Its one clear answer avoids ties in greedy decoding."""
    return f"\n\nCount from {node} to {node + 12}."


class Sizes(NamedTuple):
    branches: int
    prefix_tokens: int
    max_tokens: int


def default_sizes(*, on_gpu: bool, quick: bool) -> Sizes:
    if on_gpu:
        return Sizes(16, 2000, 64) if quick else Sizes(32, 4000, 200)
    return Sizes(6, 400, 16) if quick else Sizes(8, 600, 24)


_AROUND = 150  # most tokens of questions and marks; a token may be a character


def check_fits(
    names: Sequence[str], sizes: Sizes, arrivals: Sequence[Arrival], context: int | None
) -> None:
    """Raise WorkloadError if no request of a workload fits a server's `context` of tokens."""
    if context is None:
        return
    needed = {name: sizes.prefix_tokens // (1 + (name == "unshared")) + 1 for name in names}
    if too_long := [name for name, tokens in needed.items() if tokens >= context]:
        answers = {"rollout": 8, "tree-of-thoughts": 3, "chains": 1 + CHAINS}
        more = max(answers.get(name, 1) for name in names) * sizes.max_tokens
        most = context - more - _AROUND
        way_out = (
            f"pass --prefix-tokens {most} or less"
            if most > 0
            else f"pass fewer --max-tokens than {sizes.max_tokens} and fewer --prefix-tokens"
        )
        raise WorkloadError(
            f"the context holds {context:,} tokens, and prompts have {sizes.prefix_tokens:,}: no "
            f"request of {', '.join(too_long)} fits, so nothing could be compared; {way_out}"
        )
    if arrivals:
        shortest = min(arrival.input_length + arrival.output_length for arrival in arrivals)
        if shortest > context:
            raise WorkloadError(
                f"the context holds {context:,} tokens, and the shortest request of the trace has "
                f"{shortest:,}, so nothing could be compared"
            )


def make_workloads(
    names: Sequence[str], sizes: Sizes, *, characters_a_token: float = 1.0
) -> list[Workload]:
    branches, answer = sizes.branches, sizes.max_tokens
    characters = max(1, round(sizes.prefix_tokens * characters_a_token))
    tree = generate_thought_tree(
        width=max(1, min(branches, 8) // 2),
        keep=2,
        prompt_tokens=sizes.prefix_tokens,
        shortest=max(1, answer // 2),
        longest=answer,
        characters_a_token=characters_a_token,
    )
    makers: dict[str, Callable[[], Workload]] = {
        "parallel-samples": partial(samples, "parallel-samples", characters, [answer] * branches),
        "tree-of-thoughts": partial(tree_of_thoughts, tree),
        "rollout": partial(samples, "rollout", characters, long_answers(branches, 2 * answer)),
    }
    tokens = sizes.prefix_tokens
    documents = 2 if branches > 1 else 1
    batches: dict[str, tuple[Make, prompts.Sizes]] = {
        "few-shot": (levels, prompts.Sizes(tokens, branches, 0)),
        "document-questions": (
            partial(levels, nodes=((documents, 1),)),
            prompts.Sizes(tokens, branches // documents * documents, 0),
        ),
        "unshared": (levels, prompts.Sizes(0, branches, max(1, tokens // 2))),
    }
    for name, (make, theirs) in PROGRAMS.items():
        together = max(1, branches // CHAINS) if name == "chains" else branches
        batches[name] = make, theirs._replace(prefix=tokens, branches=together)
    for name, (make, asked) in batches.items():
        makers[name] = partial(in_text, name, make, characters_a_token, asked, answer)
    return [makers[name]() for name in names]


def trace_workload(
    arrivals: Sequence[Arrival], name: str, characters_a_token: float, *, rate: float | None = None
) -> Workload:
    """The requests of a trace, at its times, or as Poisson arrivals of `rate`."""

    @lru_cache(maxsize=20_000)
    def block(id: int | str, characters: int) -> str:
        head = f"{id}: "  # blocks differ from their first token on
        return (head + passage(characters, f"block {id}"))[:characters]

    def prompt(number: int, arrival: Arrival) -> str:
        """Made when it is sent: all prompts together would not fit into memory."""
        characters = round(BLOCK_TOKENS * characters_a_token)
        blocks = [block(id, characters) for id in arrival.hash_ids]
        if len(blocks) * BLOCK_TOKENS < arrival.input_length:  # a rest without an id
            blocks.append(block(f"r{number}", characters))
        return "".join(blocks)[: max(1, round(arrival.input_length * characters_a_token))]

    origin = arrivals[0].timestamp
    times, said = [(arrival.timestamp - origin) / 1e3 for arrival in arrivals], "the trace's times"
    if rate is not None:
        times, said = poisson(len(arrivals), rate)
    prompts = sum(arrival.input_length for arrival in arrivals)
    return Workload(
        "trace",
        f"{len(arrivals):,} requests of {name}: {prompts:,} prompt tokens, "
        f"{shared_tokens(arrivals) / prompts:.0%} of them shared with an earlier request",
        (),
        tuple(
            Request(
                f"request {at}",
                partial(prompt, at, arrival),
                arrival.output_length,
                at=due,
                prompt_tokens=arrival.input_length,
            )
            for at, (due, arrival) in enumerate(zip(times, arrivals, strict=True))
        ),
        said,
    )

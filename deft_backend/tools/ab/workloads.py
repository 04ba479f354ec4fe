"""The workloads that `deft ab` replays: invented ones, the same on every machine, and traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from deft_backend.tools.harness.workload import (
    Request,
    Workload,
    WorkloadError,
    poisson,
    thought_requests,
)
from deft_backend.tools.traces.invented import passage, question
from deft_backend.tools.traces.thought_trees import (
    ThoughtTree,
    ThoughtTreeShape,
    generate_thought_tree,
)

if TYPE_CHECKING:
    from deft_backend.tools.traces.arrivals import Arrival

WORKLOADS = ("few-shot", "parallel-samples", "document-questions", "tree-of-thoughts", "unshared")
"""The workloads that run if the user names none."""

CHOICES = (*WORKLOADS, "rollout")


def few_shot(branches: int, characters: int, max_tokens: int) -> Workload:
    prompt = passage(characters, 1)
    return Workload(
        "few-shot",
        f"{branches} questions behind one prompt of {characters} characters",
        (prompt,),
        tuple(
            Request(f"branch {i}", prompt + question(i, prompt), max_tokens)
            for i in range(branches)
        ),
    )


def parallel_samples(samples: int, characters: int, max_tokens: int) -> Workload:
    notes = passage(characters, 2)
    prompt = notes + question(0, notes)
    return Workload(
        "parallel-samples",
        f"{samples} samples of one prompt of {len(prompt)} characters",
        (prompt,),
        tuple(Request(f"sample {at}", prompt, max_tokens) for at in range(samples)),
    )


def document_questions(
    documents: int, questions: int, characters: int, max_tokens: int
) -> Workload:
    texts = [f"Answer from the notes.\n\n{passage(characters, 3000 + d)}" for d in range(documents)]
    return Workload(
        "document-questions",
        f"{questions} questions about each of {documents} documents of {characters} characters",
        tuple(texts),
        tuple(  # the documents take turns, as in real traffic
            Request(f"document {d} question {q}", text + question(q, text), max_tokens)
            for q in range(questions)
            for d, text in enumerate(texts)
        ),
    )


def rollout(samples: int, characters: int, mean_tokens: int) -> Workload:
    """Samples of one prompt with long answers, as in RL: log-normal, up to four times the mean."""
    chance = random.Random("rollout 4")
    notes = passage(characters, 4)
    prompt = notes + question(0, notes)
    drawn = [mean_tokens * chance.lognormvariate(-0.2, 0.63) for _ in range(samples)]
    lengths = [max(1, min(round(length), 4 * mean_tokens)) for length in drawn]
    return Workload(
        "rollout",
        f"{samples} samples of one prompt of {len(prompt)} characters, answers of {min(lengths)} "
        f"to {max(lengths)} tokens",
        (prompt,),
        tuple(Request(f"sample {at}", prompt, length) for at, length in enumerate(lengths)),
    )


def unshared(requests: int, characters: int, max_tokens: int) -> Workload:
    """Prompts that differ from their first character on: tree attention must lose nothing here."""
    notes = [passage(characters, 5000 + i) for i in range(requests)]
    return Workload(
        "unshared",
        f"{requests} prompts of {characters} characters, all different",
        (),
        tuple(
            Request(f"request {i}", f"{i + 1}. {text}{question(0, text)}", max_tokens)
            for i, text in enumerate(notes)
        ),
    )


def tree_of_thoughts(tree: ThoughtTree) -> Workload:
    """A tree: one request for each thought; its children start when it ends, with a line of their
    own, or greedy decoding would give all siblings the same answer.
    """
    requests = thought_requests(tree, tree.prompt, _mark)
    said = f"{len(requests)} thoughts, {tree.last_iteration} iterations"
    return Workload("tree-of-thoughts", said, (tree.prompt,), requests)


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


_AROUND = 100  # most tokens of questions and marks; a token may be a character


def check_fits(
    names: Sequence[str], sizes: Sizes, arrivals: Sequence[Arrival], context: int | None
) -> None:
    """Raise WorkloadError if no request of a workload fits a server's `context` of tokens."""
    if context is None:
        return
    needed = {name: sizes.prefix_tokens // (1 + (name == "unshared")) + 1 for name in names}
    if too_long := [name for name, tokens in needed.items() if tokens >= context]:
        answers = {"rollout": 8, "tree-of-thoughts": 3}
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
                f"{shortest:,}, so nothing could be compared; pass a smaller --scale"
            )


def make_workloads(
    names: Sequence[str], sizes: Sizes, *, characters_a_token: float = 1.0
) -> list[Workload]:
    count, answer = sizes.branches, sizes.max_tokens
    characters = max(1, round(sizes.prefix_tokens * characters_a_token))
    shape = ThoughtTreeShape(
        width=max(1, min(count, 8) // 2),
        keep=2,
        prompt_tokens=sizes.prefix_tokens,
        shortest=max(1, answer // 2),
        longest=answer,
        characters_a_token=characters_a_token,
    )
    documents = 2 if count > 1 else 1
    makers: dict[str, Callable[[], Workload]] = {
        "few-shot": partial(few_shot, count, characters, answer),
        "parallel-samples": partial(parallel_samples, count, characters, answer),
        "document-questions": partial(
            document_questions, documents, count // documents, characters, answer
        ),
        "tree-of-thoughts": partial(tree_of_thoughts, generate_thought_tree(shape)),
        "unshared": partial(unshared, count, max(1, characters // 2), answer),
        "rollout": partial(rollout, count, characters, 2 * answer),
    }
    return [makers[name]() for name in names]


def trace_workload(
    arrivals: Sequence[Arrival],
    name: str,
    characters_a_token: float,
    *,
    rate: float | None = None,
    seed: int = 0,
) -> Workload:
    """The requests of a trace, at its times, or as Poisson arrivals of `rate`. Another `seed` makes
    other texts, which no server has cached.
    """
    from deft_backend.tools.traces.arrivals import shared_tokens  # it loads NumPy

    @lru_cache(maxsize=20_000)
    def block(id: int | str, characters: int) -> str:
        head = f"{id}.{seed}: "  # blocks differ from their first token on
        return (head + passage(characters, f"{seed} {id}"))[:characters]

    def prompt(number: int, arrival: Arrival) -> str:
        """Made when it is sent: all prompts together would not fit into memory."""
        characters = round(arrival.block_tokens * characters_a_token)
        blocks = [block(id, characters) for id in arrival.hash_ids]
        if len(blocks) * arrival.block_tokens < arrival.input_length:  # a rest without an id
            blocks.append(block(f"r{number}", characters))
        return "".join(blocks)[: max(1, round(arrival.input_length * characters_a_token))]

    origin = arrivals[0].timestamp
    times, said = [(arrival.timestamp - origin) / 1e3 for arrival in arrivals], "the trace's times"
    if rate is not None:
        times, said = poisson(len(arrivals), rate, seed)
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

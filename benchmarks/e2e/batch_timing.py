"""Time per output token as a difference of two batches' times; what a client sees of it.

Two batches of the same prompts that differ in the length of their answers by n tokens differ in
time by n decode steps of the whole batch. The difference takes out whatever a request costs besides
decoding: sending and parsing its ids, matching its prefix, prefilling the rest. The shorter answers
have one token where the host takes all prompts of a batch in at once, and the median of several
counts; where it takes in one after the other, they are as long as it takes until the last has come,
or the whole batch would never decode together. Both are asked for without streaming, so that
neither the server's nor the client's work for each streamed token counts. Latencies as a client
sees them come from one streamed pass, where that work shows.
"""

from __future__ import annotations

import asyncio
import math
import statistics

from benchmarks.e2e.prompt_cases import Case, percentile
from benchmarks.e2e.serving_rows import Row
from deft_backend.harness.answers import Answer
from deft_backend.harness.client import Client

FASTEST_STEP = 0.004
"""Seconds of a decode step of the models that are measured, at least."""

OFTEN = 3
"""Batches of one-token answers beside each long one: they cost little, and how long they take hangs
on where in the server's loop they arrive."""

LONGEST_WAIT = 1024
"""Tokens of the shorter answers, at most."""


async def measure(
    case: Case,
    gen: int,
    repeats: int,
    client: Client,
    row: Row,
    *,
    room: int = LONGEST_WAIT,
    fastest: bool = False,
) -> None:
    """Fill in the figures of a case.

    Parameters
    ----------
    case : Case
        What to send.
    gen : int
        n, the output tokens that are timed.
    repeats : int
        Long batches; their median counts, or the fastest, and all are in the row's ``detail``.
    client : Client
    row : Row
        Receives the figures.
    room : int
        Output tokens that the context holds beside the longest prompt and `gen` more, at least 1.
    fastest : bool
        Whether the fastest of the batches count, instead of their median: for what a step takes
        undisturbed, where something else disturbs it for seconds at a time.
    """
    typical = min if fastest else statistics.median
    for prompt in case.warm:
        await client.batch([prompt], 1)
    await client.batch(case.prompts, gen + 1)  # all prompts are cached, all kernels compiled
    fewest, often = 1, OFTEN
    if not client.takes_in_together:
        _, one = await client.batch(case.prompts, 1)
        _, seconds = await client.batch(case.prompts, gen + 1)
        fewest, often = min(_until_all_decode(one, seconds, gen), room), 1
    pairs = []
    for _ in range(repeats):
        few = [(await client.batch(case.prompts, fewest))[1] for _ in range(often)]
        _, many = await client.batch(case.prompts, fewest + gen)
        pairs.append((few, many))
    short = typical(second for few, _ in pairs for second in few)
    if client.takes_in_together:
        one, seconds = short, typical(many for _, many in pairs)
    if client.takes_in_together or fastest:  # a short batch that was slow makes no step fast
        pairs = [([short], many) for _, many in pairs]
    times = [(many - few[0]) / gen * 1e3 for few, many in pairs]
    found = typical(times)
    row["tpot_ms"] = round(found, 4) if found > 0 else None  # else it is lost in the noise
    row["detail"]["tpot_of_runs"] = "fastest" if fastest else "median"
    row["tokens_per_s"] = round(len(case.prompts) * (gen + 1) / seconds, 2)
    row["detail"]["tpot_from_tokens"] = fewest
    row["detail"]["one_token_s"] = round(one, 4)
    row["detail"]["tpot_runs_ms"] = [round(time, 4) for time in times]
    answers = await asyncio.gather(*(client.stream(prompt, gen + 1) for prompt in case.prompts))
    latencies(answers, row)


def _until_all_decode(one: float, all_of_them: float, gen: int) -> int:
    """Tokens after which requests that came one by one all decode.

    `one` are the seconds of a batch with answers of one token, and as such no less than what lies
    between the first request and the last; `all_of_them` those of one with `gen` tokens more. Steps
    of a batch that was never whole are shorter than those that are to be measured, if anything.
    """
    step = max((all_of_them - one) / gen, FASTEST_STEP)
    return min(math.ceil(one / step), LONGEST_WAIT) + 1


def latencies(answers: list[Answer], row: Row) -> None:
    """Fill in times to first token and between tokens, over all answers."""
    firsts = [answer.arrivals[0] for answer in answers if answer.arrivals]
    gaps = [gap for answer in answers for gap in answer.gaps]
    row["ttft_ms"] = milliseconds(percentile(firsts, 0.5))
    row["ttft_p99_ms"] = milliseconds(percentile(firsts, 0.99))
    row["itl_p50_ms"] = milliseconds(percentile(gaps, 0.5))
    row["itl_p99_ms"] = milliseconds(percentile(gaps, 0.99))


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds, to the microsecond."""
    return None if seconds is None else round(seconds * 1e3, 3)

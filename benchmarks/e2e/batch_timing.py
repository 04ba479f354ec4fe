"""Time per output token, as the difference of the times of two batches; latencies of a client.

Two batches have the same prompts, and answers whose lengths differ by n tokens. Their times differ
by n decode steps of the whole batch. The difference removes everything else: sending and parsing
ids, matching prefixes, prefilling the rest. The length of the shorter answers depends on the host.
If the host takes in all prompts of a batch at once, it is one token, and the median of several
short batches counts. If the host takes in one prompt after the other, the shorter answers must last
until the last prompt has arrived. Otherwise the whole batch would never decode together. Neither
batch is streamed, so work for each streamed token does not count. A separate streamed pass measures
the latencies that a client sees, and the time per token while all requests decode. An equal pass
before it does not count: requests that arrive one by one make batches of sizes for which the host
compiles kernels of its own.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence

from benchmarks.e2e.prompt_cases import Case, percentile
from benchmarks.e2e.serving_rows import Row
from benchmarks.token_client.client import Client
from deft_backend.tools.harness.answers import Answer

FASTEST_STEP = 0.004
"""Lower bound for the seconds of a decode step of the measured models."""

OFTEN = 3
"""Batches of one-token answers for each long batch. They cost little, and their time depends on the
point in the server's loop at which they arrive."""

LONGEST_WAIT = 1024
"""Upper bound for the tokens of the shorter answers."""


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
    """Measure a case and put its figures into the row.

    Parameters
    ----------
    case : Case
        The prompts.
    gen : int
        n, the output tokens to time.
    repeats : int
        Number of long batches. Their median or the fastest counts; ``detail`` has all of them.
    client : Client
    row : Row
        Receives the figures.
    room : int
        Output tokens that fit the context besides the longest prompt and `gen`; at least 1.
    fastest : bool
        Whether the fastest batches count instead of the median. This gives the time of an
        undisturbed step if something else disturbs steps for seconds at a time.
    """
    typical = min if fastest else statistics.median
    for prompt in case.warm:
        await client.batch([prompt], 1)
    await client.batch(case.prompts, gen + 1)  # caches all prompts and compiles all kernels
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
    if client.takes_in_together or fastest:  # a slow short batch must not make steps look fast
        pairs = [([short], many) for _, many in pairs]
    times = [(many - few[0]) / gen * 1e3 for few, many in pairs]
    found = typical(times)
    row["tpot_ms"] = round(found, 4) if found > 0 else None  # otherwise noise hides the time
    row["detail"]["tpot_of_runs"] = "fastest" if fastest else "median"
    row["tokens_per_s"] = round(len(case.prompts) * (gen + 1) / seconds, 2)
    row["detail"]["tpot_from_tokens"] = fewest
    row["detail"]["one_token_s"] = round(one, 4)
    row["detail"]["tpot_runs_ms"] = [round(time, 4) for time in times]
    for _ in range(2):  # the second pass counts
        answers = await asyncio.gather(*(client.stream(prompt, gen + 1) for prompt in case.prompts))
    latencies(answers, row)
    row["detail"]["steady_ms"] = milliseconds(steady(answers))


def _until_all_decode(one: float, all_of_them: float, gen: int) -> int:
    """Tokens after which all requests decode, if the host takes them in one by one.

    Parameters
    ----------
    one : float
        Seconds of a batch with one-token answers. This bounds the time between the arrivals of the
        first and the last request.
    all_of_them : float
        Seconds of a batch with `gen` tokens more. Steps of an incomplete batch can only be shorter
        than the steps to measure.
    gen : int
    """
    step = max((all_of_them - one) / gen, FASTEST_STEP)
    return min(math.ceil(one / step), LONGEST_WAIT) + 1


def latencies(answers: Sequence[Answer], row: Row) -> None:
    """Put times to first token and gaps between tokens into the row, over all answers."""
    firsts = [answer.arrivals[0] for answer in answers if answer.arrivals]
    gaps = [gap for answer in answers for gap in answer.gaps]
    row["ttft_ms"] = milliseconds(percentile(firsts, 0.5))
    row["ttft_p99_ms"] = milliseconds(percentile(firsts, 0.99))
    row["itl_p50_ms"] = milliseconds(percentile(gaps, 0.5))
    row["itl_p99_ms"] = milliseconds(percentile(gaps, 0.99))


def steady(answers: Sequence[Answer]) -> float | None:
    """Seconds per token of one request while all requests decode.

    This is the time from the last first token to the first last one. A token that arrives together
    with the one before it counts, as accepted drafts do. None if no such time is left.
    """
    streamed = [[answer.sent + at for at in answer.arrivals] for answer in answers]
    if not all(streamed):
        return None
    begin, end = max(times[0] for times in streamed), min(times[-1] for times in streamed)
    seconds, tokens = 0.0, 0
    for times in streamed:
        within = [at for at in times if begin <= at <= end]
        if within:
            seconds += within[-1] - within[0]
            tokens += sum(at > within[0] for at in within)
    return seconds / tokens if tokens else None


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds, rounded to the microsecond."""
    return None if seconds is None else round(seconds * 1e3, 3)

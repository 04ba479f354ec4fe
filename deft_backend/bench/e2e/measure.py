"""Time per output token as (time for n + 1 tokens − time for one) ÷ n; what a client sees of it.

The difference takes out whatever a request costs besides decoding: sending and parsing its ids,
matching its prefix, prefilling the rest. It is taken from whole batches without streaming, so that
neither the server's nor the client's work for each streamed token is in it. Latencies as a client
sees them come from one streamed pass, where that work shows.
"""

from __future__ import annotations

import asyncio
import statistics

from deft_backend.bench.e2e.cases import Case, percentile
from deft_backend.bench.e2e.client import Client, Completion
from deft_backend.bench.e2e.rows import Row


async def measure(case: Case, gen: int, repeats: int, client: Client, row: Row) -> None:
    """Fill in the figures of a case.

    Parameters
    ----------
    case : Case
        What to send.
    gen : int
        n, the output tokens that are timed.
    repeats : int
        Pairs of times; their median counts, all are in the row's ``detail``.
    client : Client
    row : Row
        Receives the figures.
    """
    for prompt in case.warm:
        await client.batch([prompt], 1)
    await client.batch(case.prompts, gen + 1)  # all prompts are cached, all kernels compiled
    pairs = []
    for _ in range(repeats):
        _, one = await client.batch(case.prompts, 1)
        _, all_of_them = await client.batch(case.prompts, gen + 1)
        pairs.append((one, all_of_them))
    times = [(many - one) / gen * 1e3 for one, many in pairs]
    seconds = statistics.median(many for _, many in pairs)
    median = statistics.median(times)
    row["tpot_ms"] = round(median, 4) if median > 0 else None  # else it is lost in the noise
    row["tokens_per_s"] = round(len(case.prompts) * (gen + 1) / seconds, 2)
    row["detail"]["tpot_runs_ms"] = [round(time, 4) for time in times]
    answers = await asyncio.gather(*(client.stream(prompt, gen + 1) for prompt in case.prompts))
    latencies(answers, row)


def latencies(answers: list[Completion], row: Row) -> None:
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

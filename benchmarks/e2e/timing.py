"""Times of a workload on one server: figures for its row.

*Batches.* Two batches have the same prompts, and answers whose lengths differ by n tokens. Their
times differ by n decode steps of the whole batch. The difference removes everything else: sending
and parsing ids, matching prefixes, prefilling the rest. The length of the shorter answers depends
on the host. If the host takes in all prompts of a batch at once, it is one token, and the median of
several short batches counts. If the host takes in one prompt after the other, the shorter answers
must last until the last prompt has arrived. Otherwise the whole batch would never decode together.
Neither batch is streamed, so work for each streamed token does not count. A separate streamed pass
measures the latencies that a client sees, and the time per token while all requests decode. An
equal pass before it does not count: requests that arrive one by one make batches of sizes for which
the host compiles kernels of its own.

*Replays.* Requests wait for the answers that they continue. The first replay does not count.

*Beams.* The time per token is the difference between a search of all tokens and one of one token.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.e2e.launch import Launch
from benchmarks.e2e.rows import Row
from benchmarks.e2e.workloads import BATCHES, BEAMS, Ids, Job
from deft_backend.tools.harness.answers import ANSWERED, FAILED, Answer, NotAnswered
from deft_backend.tools.harness.client import ServerClient
from deft_backend.tools.harness.workload import Workload, replay

FASTEST_STEP = 0.004
"""Lower bound for the seconds of a decode step of the measured models."""

OFTEN = 3
"""Batches of one-token answers for each long batch. They cost little, and their time depends on the
point in the server's loop at which they arrive."""

LONGEST_WAIT = 1024
"""Upper bound for the tokens of the shorter answers."""

MANY_IDS = 250_000
"""A batch with more token ids than this has fewer repeats: sending them takes most of the time."""

ENOUGH_SECONDS = 12.0
"""No further replay starts once the earlier ones together took longer than this."""


async def measure(job: Job, launch: Launch, client: ServerClient, row: Row) -> None:
    """Measure a job and put its figures into the row; raises NotAnswered."""
    await {BATCHES: _batches, BEAMS: _beams}.get(job.how, _replays)(job, launch, client, row)


def prompts_of(workload: Workload) -> list[Ids]:
    """The prompts of requests that arrive together."""
    prompts = [request.own_part() for request in workload.requests]
    assert all(isinstance(prompt, tuple) for prompt in prompts)
    return prompts  # type: ignore[return-value]


async def _timed(client: ServerClient, prompts: Sequence[Ids], tokens: int) -> float:
    began = time.perf_counter()
    await client.batch(prompts, tokens)
    return time.perf_counter() - began


async def _batches(job: Job, launch: Launch, client: ServerClient, row: Row) -> None:
    workload, gen = job.workload(launch.model.ids, 0), job.gen
    prompts = prompts_of(workload)
    # SGLang reads all prompts of a batch before it decodes; a decode server gets one by one.
    together = launch.host.name == "sglang" and not launch.disaggregated
    on_gpu = launch.host.on_gpu()
    repeats = (3 if sum(map(len, prompts)) > MANY_IDS else 7) if on_gpu else 1
    for prompt in workload.warm:
        await client.batch([prompt], 1)
    await client.batch(prompts, gen + 1)  # caches all prompts and compiles all kernels
    fewest, often = 1, OFTEN
    if not together:
        one = await _timed(client, prompts, 1)
        seconds = await _timed(client, prompts, gen + 1)
        room = launch.model.context - max(map(len, prompts)) - gen
        fewest, often = min(_until_all_decode(one, seconds, gen), room), 1
    pairs = []
    for _ in range(job.repeats or repeats):
        few = [await _timed(client, prompts, fewest) for _ in range(often)]
        pairs.append((few, await _timed(client, prompts, fewest + gen)))
    if together:
        one = statistics.median(second for few, _ in pairs for second in few)
        seconds = statistics.median(many for _, many in pairs)
        pairs = [([one], many) for _, many in pairs]
    times = [(many - few[0]) / gen * 1e3 for few, many in pairs]
    middle = statistics.median(times)
    row["tpot_ms"] = round(middle, 4) if middle > 0 else None  # otherwise noise hides the time
    row["tokens_per_s"] = round(len(prompts) * (gen + 1) / seconds, 2)
    row["detail"] |= {
        "tpot_of_runs": "median",
        "tpot_from_tokens": fewest,
        "one_token_s": round(one, 4),
        "tpot_runs_ms": [round(time, 4) for time in times],
    }
    for _ in range(2):  # the second pass counts
        found = await asyncio.gather(*(client.ask(prompt, gen + 1) for prompt in prompts))
    answers = [answer for answer, _ in found]
    latencies(answers, row)
    row["detail"]["steady_ms"] = milliseconds(steady(answers))


def _until_all_decode(one: float, all_of_them: float, gen: int) -> int:
    """Tokens after which all requests decode, if the host takes them in one by one.

    - `one`: seconds of a batch with one-token answers. This bounds the time between the arrivals of
      the first and the last request.
    - `all_of_them`: seconds of a batch with `gen` tokens more. Steps of an incomplete batch can
      only be shorter than the steps to measure.
    """
    step = max((all_of_them - one) / gen, FASTEST_STEP)
    return min(math.ceil(one / step), LONGEST_WAIT) + 1


async def _replays(job: Job, launch: Launch, client: ServerClient, row: Row) -> None:
    """Medians over the replays that count; times to first token and gaps are of all of them.

    The whole time of a rollout counts from the first prompt: a trainer's prompts are new.
    """
    wanted = job.repeats or (3 if launch.host.on_gpu() else 1)
    rollouts = job.name == "rollouts"
    answers: list[Answer] = []
    totals: list[float] = []
    for repeat in range(wanted + 1):
        began = time.perf_counter()
        run = await replay(job.workload(launch.model.ids, repeat), client)
        for each in run.outcomes:
            tokens = 0 if each.answer is None else len(each.answer.arrivals)
            if each.status != ANSWERED or tokens != each.max_tokens:
                said = f"{each.detail} ({tokens} of {each.max_tokens} tokens)"
                raise NotAnswered(each.status, f"{each.name}: {said}")
        if repeat:
            whole = time.perf_counter() - began
            totals.append(whole if rollouts else run.seconds)
            answers += [each.answer for each in run.outcomes if each.answer is not None]
        if sum(totals) > ENOUGH_SECONDS and job.sizes is None:
            break
    latencies(answers, row)
    times = [tpot for answer in answers if (tpot := answer.tpot) is not None]
    total = statistics.median(totals)
    tokens = sum(len(answer.arrivals) for answer in answers) // len(totals)
    row["tpot_ms"] = None if rollouts or not times else milliseconds(statistics.median(times))
    row["tokens_per_s"] = round(tokens / total, 2)
    kinds = {
        kind: milliseconds(statistics.median(firsts))
        for kind in ("start", "fork", "return")
        if (firsts := [a.ttft for a in answers if f", {kind}" in a.request])
    }
    row["detail"] |= {
        "requests": len(answers) // len(totals),
        "tokens": tokens,
        "total_s": round(total, 3),
        "total_runs_s": [round(total, 3) for total in totals],
        **({"ttft_by_kind_ms": kinds} if kinds else {}),
    }


async def _beams(job: Job, launch: Launch, client: ServerClient, row: Row) -> None:
    assert job.sizes is not None
    width = job.sizes.branches
    one_token, times = [], []
    for repeat in range((job.repeats or 3) + 1):
        workload = job.workload(launch.model.ids, repeat)
        if not repeat:
            await client.batch(workload.warm, 1)
        (prompt,) = prompts_of(workload)
        few = [await _search(client, launch, prompt, width, 1) for _ in range(OFTEN)]
        whole = await _search(client, launch, prompt, width, job.gen)
        if repeat:  # the first search compiles kernels of the host
            one_token.append(statistics.median(few))
            times.append(whole)
    steps = [(many - one) / (job.gen - 1) for many, one in zip(times, one_token, strict=True)]
    row["tpot_ms"] = milliseconds(statistics.median(steps))
    total = statistics.median(times)
    row["tokens_per_s"] = round(width * job.gen / total, 2)
    row["detail"] |= {
        "requests": width,
        "tokens": width * job.gen,
        "total_s": round(total, 3),
        "total_runs_s": [round(time, 3) for time in times],
        "tpot_runs_ms": [milliseconds(step) for step in steps],
    }


async def _search(
    client: ServerClient, launch: Launch, prompt: Ids, width: int, tokens: int
) -> float:
    """Seconds of a beam search, which each host offers in another form."""
    began = time.perf_counter()
    if launch.host.name == "sglang":
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        sampling |= {"beam_width": width, "n": width}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": False}
        content = await client.post("/generate", body)
        beams = content["meta_info"].get("beam_results") or [content]
        found = [len(beam["output_ids"]) for beam in beams]
    else:
        body = {"model": client.model, "prompt": list(prompt), "max_tokens": tokens}
        body |= {"use_beam_search": True, "n": width, "temperature": 0, "ignore_eos": True}
        content = await client.post("/v1/completions", {**body, "return_token_ids": True})
        found = [len(choice["token_ids"]) for choice in content["choices"]]
    if found != [tokens] * width:
        raise NotAnswered(FAILED, f"asked for {width} beams of {tokens} tokens, got {found}")
    return time.perf_counter() - began


def latencies(answers: Sequence[Answer], row: Row) -> None:
    """Put times to first token and gaps between tokens into the row, over all answers."""
    firsts = percentiles((answer.ttft for answer in answers if answer.arrivals), (50, 99))
    pairs = (pair for answer in answers for pair in pairwise(answer.arrivals))
    gaps = percentiles((later - earlier for earlier, later in pairs), (50, 99))
    row["ttft_ms"], row["ttft_p99_ms"] = firsts["p50"], firsts["p99"]
    row["itl_p50_ms"], row["itl_p99_ms"] = gaps["p50"], gaps["p99"]


def percentiles(seconds: Iterable[float], shares: Sequence[int]) -> Mapping[str, Any]:
    """Nearest-rank percentiles in milliseconds, such as ``p50``; None without values."""
    ordered = sorted(seconds)
    return {
        f"p{share}": milliseconds(ordered[max(0, math.ceil(share * len(ordered) / 100) - 1)])
        if ordered
        else None
        for share in shares
    }


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

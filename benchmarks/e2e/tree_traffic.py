"""One driver for the trees that people grow: beams, rollouts, agents and chats.

The driver sends a shape's requests once without counting, then `repeats` times. Medians over the
repeats become the row. Streamed answers give times to first token and per output token. A beam
search is not streamed: its time per token is the difference between answers of all tokens and of
one token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.e2e import kept_answers
from benchmarks.e2e.backends import Launch
from benchmarks.e2e.batch_timing import OFTEN, latencies, milliseconds
from benchmarks.e2e.prompt_cases import percentile
from benchmarks.e2e.served_workloads import Served, answers_file
from benchmarks.e2e.serving_rows import Row, make_row
from benchmarks.e2e.tree_shapes import Beams, TreeShape
from benchmarks.token_client.client import Client
from benchmarks.token_client.send_requests import send_requests
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Workload


@dataclass
class Repeat:
    """What one repeat took: seconds of the prompts cached before, of the requests, of sleeping.

    ``one_token``: seconds of a beam search of one token.
    """

    warm: float = 0.0
    seconds: float = 0.0
    slept: float | None = None
    one_token: float | None = None
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)


@dataclass(frozen=True)
class TreeTraffic:
    """A tree's requests, sent `repeats` times.

    Attributes
    ----------
    shape : TreeShape
    repeats : int
    """

    shape: TreeShape
    repeats: int
    seconds: float = 560.0

    def row(self, launch: Launch, backend: str) -> Row:
        shape = self.shape
        return make_row(
            shape.name, launch.host.name, backend, launch.model.name, launch.label,
            prefix=shape.prefix, branches=shape.branches, suffix=shape.suffix, gen=shape.gen,
            tp=launch.tensor_parallel,
        )  # fmt: skip

    async def run(self, served: Served, rows: Sequence[Row]) -> Row:
        row = self.row(served.launch, served.backend)
        model, client = served.launch.model, served.client
        sleeps = self.shape.sleeps and served.launch.sleeps
        found = []
        for repeat in range(self.repeats + 1):
            workload = self.shape.workload(model, repeat)
            found.append(await self._repeat(workload, client, sleeps=sleeps and repeat > 0))
        counted = found[1:]
        fill(row, self.shape, counted)
        if model.load_format != "dummy" and not self.shape.sleeps:  # sampled answers are no test
            kept_answers.keep(
                answers_file(served.folder, row, served.backend),
                [replace(each, arrivals=[], sent=0.0) for each in counted[0].answers],
            )
        return row

    async def _repeat(self, workload: Workload, client: Client, *, sleeps: bool) -> Repeat:
        found = Repeat(slept=await client.sleep_and_wake() if sleeps else None)
        began = time.perf_counter()
        for prompt in workload.warm:
            assert isinstance(prompt, tuple)
            await client.batch([prompt], 1)
        found.warm = time.perf_counter() - began
        if isinstance(self.shape, Beams):
            short = _shortened(workload)
            found.one_token = statistics.median([(await _sent(short, client))[1]
                                                 for _ in range(OFTEN)])  # fmt: skip
        found.answers, found.seconds = await _sent(workload, client)
        return found


def fill(row: Row, shape: TreeShape, repeats: Sequence[Repeat]) -> None:
    """Put the medians of the repeats into the row; ``detail`` has each of them."""
    totals = [each.seconds + (each.warm if shape.whole else 0.0) for each in repeats]
    row["tokens_per_s"] = round(repeats[0].tokens / statistics.median(totals), 2)
    detail: dict[str, Any] = {
        "requests": len(repeats[0].answers), "tokens": repeats[0].tokens,
        "total_s": round(statistics.median(totals), 3),
        "total_runs_s": [round(total, 3) for total in totals],
    }  # fmt: skip
    slept = [each.slept for each in repeats if each.slept is not None]
    if slept:
        detail["sleep_and_wake_s"] = round(statistics.median(slept), 3)
    if isinstance(shape, Beams):
        times = [(each.seconds - (each.one_token or 0.0)) / (shape.gen - 1) for each in repeats]
        row["tpot_ms"] = milliseconds(statistics.median(times))
        detail["tpot_runs_ms"] = [milliseconds(each) for each in times]
    streamed = [answer for each in repeats for answer in each.answers if answer.arrivals]
    if streamed:
        latencies(streamed, row)
        row["tpot_ms"] = _median(answer.tpot for answer in streamed)
        detail["ttft_by_kind_ms"] = {
            kind: milliseconds(percentile(_firsts(streamed, kind), 0.5))
            for kind in ("start", "fork", "return") if _firsts(streamed, kind)
        }  # fmt: skip
    row["detail"] |= detail


def _firsts(answers: Sequence[Answer], kind: str) -> list[float]:
    return [answer.ttft for answer in answers if f", {kind}" in answer.request]


def _median(times: Any) -> float | None:
    known = [each for each in times if each is not None]
    return milliseconds(statistics.median(known)) if known else None


def _shortened(workload: Workload) -> Workload:
    """The same requests, with answers of one token."""
    return replace(workload, requests=tuple(replace(r, max_tokens=1) for r in workload.requests))


async def _sent(workload: Workload, client: Client) -> tuple[list[Answer], float]:
    began = time.perf_counter()
    answers = await send_requests(workload, client)
    return answers, time.perf_counter() - began

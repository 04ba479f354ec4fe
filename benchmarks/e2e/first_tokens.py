"""Time to the first token of requests that arrive at once behind a cached prefix.

Each repeat draws new tokens behind the prefix, so only the prefix is cached. It is measured twice.
Together: one request of the client holds all prompts and asks for one token each; its time ends
with the last first token. Streamed: a connection for each prompt, and answers of several tokens,
so the first decode steps run between the last prompts, as in a server under load.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.e2e.backends import Launch
from benchmarks.e2e.batch_timing import milliseconds
from benchmarks.e2e.prompt_cases import draw, percentile
from benchmarks.e2e.served_workloads import Served
from benchmarks.e2e.serving_rows import Row, make_row

TOKENS = 16
"""Of each streamed answer."""

WARM_UPS = 5
"""Repeats that do not count: in them the host compiles kernels of its own, by sizes of batches."""


@dataclass(frozen=True)
class FirstTokens:
    """Requests behind one cached prefix, sent at once, again and again.

    Attributes
    ----------
    prefix, branches, suffix : int
        Tokens of the prefix, requests, and tokens of each request behind the prefix.
    repeats : int
    """

    prefix: int
    branches: int
    suffix: int
    repeats: int
    seconds: float = 300.0

    def row(self, launch: Launch, backend: str) -> Row:
        return make_row(
            "first-tokens", launch.host.name, backend, launch.model.name, launch.label,
            prefix=self.prefix, branches=self.branches, suffix=self.suffix, gen=TOKENS,
            tp=launch.tensor_parallel,
        )  # fmt: skip

    async def run(self, served: Served, rows: Sequence[Row]) -> Row:
        """Medians over the repeats; ``detail`` has each of them."""
        row = self.row(served.launch, served.backend)
        model, client = served.launch.model, served.client
        ids = random.Random(f"first tokens {self.prefix} {self.branches} {self.suffix}")
        shared = draw(ids, model, self.prefix)
        await client.batch([shared], 1)
        together, middles, lasts = [], [], []
        for _ in range(WARM_UPS + self.repeats):
            prompts = [shared + draw(ids, model, self.suffix) for _ in range(self.branches)]
            together.append((await client.batch(prompts, 1))[1])
            prompts = [shared + draw(ids, model, self.suffix) for _ in range(self.branches)]
            answers = await asyncio.gather(*(client.stream(prompt, TOKENS) for prompt in prompts))
            firsts = [answer.arrivals[0] for answer in answers]
            middles.append(percentile(firsts, 0.5))
            lasts.append(max(firsts))
        row["ttft_ms"] = _median(middles)
        row["ttft_p99_ms"] = _median(lasts)
        row["detail"] |= {
            "together_ms": _median(together),
            "together_runs_ms": [milliseconds(time) for time in together[WARM_UPS:]],
            "ttft_runs_ms": [milliseconds(time) for time in middles[WARM_UPS:]],
            "last_runs_ms": [milliseconds(time) for time in lasts[WARM_UPS:]],
        }
        return row


def _median(times: Sequence[float | None]) -> float | None:
    counted = [time for time in times[WARM_UPS:] if time is not None]
    return milliseconds(statistics.median(counted)) if counted else None

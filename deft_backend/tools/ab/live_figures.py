"""Median and tail times of the answers of one server."""

from __future__ import annotations

import statistics
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deft_backend.tools.harness.live_request import ANSWERED
from deft_backend.tools.harness.replay import Replayed


@dataclass(frozen=True)
class Figures:
    """Medians and tails of one side of a workload, in seconds; None without an answer."""

    answered: int
    lost: Mapping[str, int]
    ttft: float | None
    ttft_p95: float | None
    tpot: float | None
    tpot_p95: float | None
    tokens_a_second: float | None
    prompt_tokens: int
    late_p95: float | None

    @property
    def requests(self) -> int:
        return self.answered + sum(self.lost.values())


def figures(run: Replayed) -> Figures:
    """What one side did."""
    answers = [o.answer for o in run.outcomes if o.answer is not None]
    ttft = [answer.ttft for answer in answers]
    tpot = [gap for answer in answers if (gap := answer.tpot) is not None]
    lost = Tally(o.status for o in run.outcomes if o.status != ANSWERED)
    late = [o.sent - o.at for o in run.outcomes if o.answer is not None and o.at]
    tokens = sum(len(answer.arrivals) for answer in answers)
    return Figures(
        answered=len(answers),
        lost=dict(lost),
        ttft=_quantile(ttft, 0.5),
        ttft_p95=_quantile(ttft, 0.95),
        tpot=_quantile(tpot, 0.5),
        tpot_p95=_quantile(tpot, 0.95),
        tokens_a_second=tokens / run.seconds if run.seconds else None,
        prompt_tokens=sum(o.prompt_tokens or 0 for o in run.outcomes),
        late_p95=_quantile(late, 0.95),
    )


def _quantile(values: Sequence[float], part: float) -> float | None:
    if not values:
        return None
    if part == 0.5:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))]

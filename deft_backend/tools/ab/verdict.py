"""One sentence about a comparison: whether to switch, and why."""

import math
import statistics
from collections.abc import Callable, Sequence

from deft_backend.tools.ab.result import AbResult, ComparedWorkload, milliseconds
from deft_backend.tools.harness.answers import CUT, SKIPPED, TOO_LONG, Answer

LEAST = 0.05  # A smaller change of the time per token is no reason to switch

FEW = 8  # with fewer pairs of answers, the sentence says nothing about times

_FIRST_TOKEN_WORSE = 0.15


def verdict(result: AbResult) -> str:
    old, new = result.names
    if len(result.sides) < 2 or not result.workloads:
        return f"No decision: the run ended before {new} was measured."
    for side in result.sides:
        died = next((run.died for run in side.runs if run.died), "")
        if died:
            say = "Do not switch" if side.name == new else "No decision"
            return f"{say}: {side.name} died during the run ({died[:120]})."
    lost = [_lost(result, side) for side in (0, 1)]
    every = sum(f.requests for w in result.workloads for f in w.figures[1:])
    if lost[1] > lost[0]:
        return f"Do not switch: {new} lost {lost[1]:,} of {every:,} requests, {old} {lost[0]:,}."
    unexplained = sum(w.agreement.unexplained for w in result.workloads)
    compared = sum(w.agreement.compared for w in result.workloads)
    if unexplained:
        return (
            f"Do not switch before you know why: {unexplained:,} of {compared:,} answers differ "
            "where a server was sure of its token."
        )
    tokens = _tokens(result, compared)
    if result.interrupted:
        return f"No decision: the run was interrupted; so far, {tokens}."
    if result.on_cpu:
        read = _reads(result)
        return f"No decision about times, which mean nothing on a CPU; {tokens}{read}."
    return _times(result, tokens)


def paired_change(w: ComparedWorkload) -> tuple[float, float, float] | None:
    """Change of the time per token, with a 95 % interval, over requests that both answered."""
    ratios = _ratios(w, lambda answer: answer.tpot)
    if len(ratios) < FEW:
        return None
    ordered = sorted(ratios)
    # The number of ratios below the true median is binomial. So order statistics bound the median.
    reach = 0.98 * math.sqrt(len(ordered))
    low = ordered[max(0, math.floor(len(ordered) / 2 - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach) - 1)]
    middle = statistics.median(ratios)
    return math.exp(middle) - 1, math.exp(low) - 1, math.exp(high) - 1


def _times(result: AbResult, tokens: str) -> str:
    new = result.names[1]
    changes = {w.name: paired_change(w) for w in result.workloads}
    known = {name: change for name, change in changes.items() if change is not None}
    if not known:
        return f"No decision: fewer than {FEW} requests were answered by both; {tokens}."
    better = [name for name, (_, _, high) in known.items() if high < -LEAST]
    worse = [name for name, (_, low, _) in known.items() if low > LEAST]
    slow_start = [w for w in result.workloads if _first_token(w) > _FIRST_TOKEN_WORSE]
    figures = "; ".join(_figure(w, known) for w in result.workloads if w.name in known)
    if better and worse:
        return (
            f"Switch only for {_and(better)}: a token of {_and(worse)} takes longer with {new} "
            f"({figures}); {tokens}."
        )
    if worse:
        return f"Do not switch: a token takes longer with {new} ({figures}); {tokens}."
    if better and slow_start:
        names = _and([w.name for w in slow_start])
        return f"Switch to {new} if the first token may come later ({names}): {figures}; {tokens}."
    if better:
        rest = [name for name in known if name not in better]
        same = f" ({_and(rest)}: no clear difference)" if rest else ""
        return f"Switch to {new}: {figures}{same}; {tokens}."
    return f"No reason to switch: {figures}, which is no clear difference; {tokens}."


def _figure(w: ComparedWorkload, known: dict[str, tuple[float, float, float]]) -> str:
    change = known[w.name][0]
    first, second = (f.tpot for f in w.figures)
    return (
        f"{w.name}: a token takes {abs(change):.0%} {'less' if change <= 0 else 'more'} time "
        f"({milliseconds(first)} → {milliseconds(second)})"
    )


def _first_token(w: ComparedWorkload) -> float:
    ratios = _ratios(w, lambda answer: answer.ttft)
    return math.exp(statistics.median(ratios)) - 1 if len(ratios) >= FEW else 0.0


def _ratios(w: ComparedWorkload, time_of: Callable[[Answer], float | None]) -> list[float]:
    first, second = (
        {o.name: o.answer for o in run.outcomes if o.answer is not None} for run in w.runs
    )
    pairs = [(time_of(first[key]), time_of(second[key])) for key in first if key in second]
    return [math.log(after / before) for before, after in pairs if before and after]


def _lost(result: AbResult, side: int) -> int:
    fair = (TOO_LONG, CUT, SKIPPED)
    return sum(
        count
        for w in result.workloads
        for status, count in w.figures[side].lost.items()
        if status not in fair
    )


def _tokens(result: AbResult, compared: int) -> str:
    if not compared:
        return "no answers could be compared"
    equal = sum(w.agreement.equal for w in result.workloads)
    if equal == compared:
        return f"all {compared:,} compared answers are the same"
    differences = [d for w in result.workloads for d in w.agreement.differences]
    asked = sum(d.margin is not None for d in differences)
    why = f"{asked:,} of them checked: near ties" if asked else "the server does not tell why"
    return f"{len(differences):,} of {compared:,} answers differ ({why})"


def _reads(result: AbResult) -> str:
    saved = [
        (read.saved, w.name)
        for w in result.workloads
        if (read := w.kv_read(1)) is not None and read.saved
    ]
    if not saved:
        return ""
    best, name = max(saved)
    return f", and {result.names[1]} reads up to {best:.0%} less KV a step ({name})"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

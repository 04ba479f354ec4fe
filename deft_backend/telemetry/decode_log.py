"""A line in the server's log about the decode steps since the previous line."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from deft_backend.telemetry.counters import KINDS, Counters

logger = logging.getLogger("deft_backend")


class DecodeLog:
    """A listener of :class:`StateWriter` that logs a line after enough decode steps and seconds.
    The limits are as SGLang's ``--decode-log-interval`` and vLLM's ``VLLM_LOG_STATS_INTERVAL``.
    """

    def __init__(self, *, steps: int = 0, seconds: float = 0.0) -> None:
        self._steps = steps
        self._seconds = seconds
        self._last = Counters()
        self._since = time.monotonic()

    def __call__(self, counters: Counters) -> None:
        stretch = counters - self._last
        if stretch.decode_steps < self._steps or time.monotonic() - self._since < self._seconds:
            return
        self._last = counters
        self._since = time.monotonic()
        if stretch.decode_steps:
            logger.info("deft: %s", describe(stretch))


def describe(stretch: Counters) -> str:
    """One line about the steps with decode rows since the previous line.

    >>> verified = Counters(kv_bytes_read=8000, kv_bytes_query_guided=2000)
    >>> describe(verified)
    'KV read 8.0 kB of contexts that hold 2.0 kB: each query block of a request reads its context'
    """
    steps = []
    tree, host = (_by_kind(stretch, tree=tree) for tree in (True, False))
    if tree:
        noun = "step" if stretch.steps_tree == 1 else "steps"
        steps.append(f"{tree} {noun} through tree attention")
    if host:
        noun = "" if tree else " step" if stretch.decode_steps == 1 else " steps"
        why = stretch.steps_host
        reason = next(iter(why)) if len(why) == 1 else reasons(why)
        steps.append(f"{host}{noun} on the host's kernel ({reason})")
    parts = [", ".join(steps)] if steps else []
    if tree and host and stretch.tree_share is not None:
        parts.append(f"tree attention did {100 * stretch.tree_share:.0f} % of the decoding")
    if stretch.verified_tokens:
        parts.append(f"{stretch.verified_tokens:,} tokens verified")
    read, guided = stretch.kv_bytes_read, stretch.kv_bytes_query_guided
    if read > guided:  # a verification's request can have several query blocks
        held = f"KV read {size(read)} of contexts that hold {size(guided)}"
        parts.append(f"{held}: each query block of a request reads its context")
    elif guided:
        share = f"{100 * read / guided:.0f} %"
        parts.append(f"KV read {size(read)} of {size(guided)} query by query ({share})")
    if time_of_a_plan(stretch):
        parts.append(f"planning {time_of_a_plan(stretch)} a plan")
    return "; ".join(parts)


def _by_kind(stretch: Counters, *, tree: bool) -> str:
    numbers = ((stretch.total(kind, tree=tree).steps, kind) for kind in KINDS)
    words = [f"{number:,} {kind}" for number, kind in numbers if number]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def reasons(steps: Mapping[str, int], most: int | None = None) -> str:
    """The steps of each reason, the commonest first; `most`: reasons that are shown."""
    ordered = sorted(steps.items(), key=lambda item: -item[1])
    parts = [f"{count:,} × {reason}" for reason, count in ordered[:most]]
    if rest := [count for _, count in ordered[len(parts) :]]:
        parts.append(f"{sum(rest):,} × {len(rest)} others")
    return ", ".join(parts)


def time_of_a_plan(counters: Counters) -> str:
    """Milliseconds; empty before the first plan, or between the counts of its two figures."""
    if not (counters.plans and counters.plan_seconds):
        return ""
    ms = 1e3 * counters.plan_seconds / counters.plans
    return f"{ms:.2g} ms" if ms < 10 else f"{ms:,.0f} ms"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things; the plural is the noun with an s unless it is given.

    >>> counted(1, "plan"), counted(2000, "query", "queries")
    ('1 plan', '2,000 queries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(count: float, digits: int = 1) -> str:
    """Bytes in decimal units.

    >>> size(310), size(1_500_000), size(41.2e9)
    ('310 B', '1.5 MB', '41.2 GB')
    """
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:,.{digits}f} {unit}"
    return f"{count:.0f} B"

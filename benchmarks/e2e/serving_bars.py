"""The end-to-end figures that a release must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.e2e.backends import HOSTS
from benchmarks.e2e.checked_answers import still_to_run
from benchmarks.e2e.serving_rows import Row, by_case, case_name

SHARED = {
    "sglang": {(65536, 32): 0.40, (16384, 64): 0.50, (4096, 128): 0.65, (4096, 32): 0.85},
    "vllm": {(65536, 32): 0.42, (16384, 64): 0.50, (4096, 128): 0.62},
}
"""Upper bound for the plugin's time per output token divided by the best other backend's (vLLM:
FLASH_ATTN's), by prefix and branches."""

SEVERAL_GPUS = {(65536, 32): 0.35, (16384, 64): 0.45, (4096, 128): 0.60}
"""The same for tensor-parallel servers of both hosts, against the host's own backend."""

BEAMS = {(4096, 128): 0.50}
"""The same for beam searches of SGLang, by prompt and width, against the host's own backend."""

DRAFTING_REQUESTS = 8
"""From so many requests on, draft trees must be faster than with every other backend."""

UNSHARED = 1.02
TTFT = 1.03
SCHEDULER_US = 30.0


@dataclass(frozen=True)
class Bar:
    """One figure, the value that a release must reach, and whether it does.

    ``met`` is None as long as there is nothing to compare with.
    """

    case: str
    asked: str
    found: str
    met: bool | None


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of every case in the rows, in their order."""
    found = []
    for backends in by_case(rows).values():
        row = next(iter(backends.values()))
        host = HOSTS[row["host"]]
        ours, reference = backends.get(host.ours), backends.get(host.backends[1])
        others = [row for name, row in backends.items() if name != host.ours]
        if row["workload"] == "scheduler":
            found.append(_scheduler(row, ours, reference))
        elif row["workload"].startswith("tree-of-thoughts"):
            found.append(_time(row, ours, others, 1.0, "faster than every other"))
        elif row["workload"].startswith(("generated-shared-prefix", "prefix_repetition")):
            found += _client(row, ours, others, ttft=row["host"] == "sglang")
        elif row["workload"].startswith("mixed-traffic"):
            found.append(_traffic(row, ours))
        elif row["workload"] == "draft-trees":
            if (row["branches"] or 0) >= DRAFTING_REQUESTS:
                found.append(_time(row, ours, others, 1.0, "faster than every other"))
        elif row["workload"].startswith(("beams", "rollouts", "agents", "chats")):
            found += _grown(row, ours, reference)
        elif row["workload"] == "unshared":
            peers = [reference] if reference else []
            asked = f"≤ {UNSHARED} of {host.backends[1]}"
            found.append(_time(row, ours, peers, UNSHARED, asked))
        elif row["tp"] > 1:
            if limit := SEVERAL_GPUS.get((row["prefix"] or 0, row["branches"] or 0)):
                peers = [reference] if reference else []
                asked = f"≤ {limit:.2f} of {host.backends[1]}"
                found.append(_time(row, ours, peers, limit, asked))
        elif limit := SHARED[host.name].get((row["prefix"] or 0, row["branches"] or 0)):
            peers = others if host.name == "sglang" else [reference] if reference else []
            against = "the best other" if host.name == "sglang" else host.backends[1]
            found.append(_time(row, ours, peers, limit, f"≤ {limit:.2f} of {against}"))
    return found


def _time(row: Row, ours: Row | None, others: Sequence[Row], limit: float, asked: str) -> Bar:
    """The plugin's time per output token divided by the best of the others'."""
    case = case_name(row)
    if failed := _failure(ours):
        return Bar(case, asked, failed, False)
    if limit < UNSHARED and ours is not None and not _at_work(ours):
        return Bar(case, asked, _IDLE, None)
    times = [time for other in others if not other["error"] and (time := other["tpot_ms"] or 0) > 0]
    if ours is None or not ours["tpot_ms"] or not times:
        return Bar(case, asked, "not measured on both", None)
    ratio = round(ours["tpot_ms"] / min(times), 4)
    met = ratio < limit if limit == 1.0 else ratio <= limit
    return Bar(case, asked, f"{ratio:.3f}", met)


def _client(row: Row, ours: Row | None, others: Sequence[Row], *, ttft: bool) -> list[Bar]:
    """The plugin's throughput above every other's; its time to first token close to the best."""
    case, asked = case_name(row), "more tokens/s than every other"
    if failed := _failure(ours):
        return [Bar(case, asked, failed, False)]
    if ours is not None and not _at_work(ours):
        return [Bar(case, asked, _IDLE, None)]
    speeds = [other["tokens_per_s"] for other in others if other["tokens_per_s"]]
    if ours is None or not ours["tokens_per_s"] or not speeds:
        return [Bar(case, asked, "not measured on both", None)]
    ratio = ours["tokens_per_s"] / max(speeds)
    found = [Bar(case, asked, f"{ratio:.3f}", ratio > 1.0)]
    peers = [other for other in others if not other["error"] and other["ttft_ms"]]
    if ttft and ours["ttft_ms"] and peers:
        ratio = round(ours["ttft_ms"] / min(other["ttft_ms"] or 0.0 for other in peers), 4)
        asked = f"time to first token ≤ {TTFT} of the best other"
        found.append(Bar(case, asked, f"{ratio:.3f}{_mean_first(ours, peers)}", ratio <= TTFT))
    return found


def _mean_first(ours: Row, others: Sequence[Row]) -> str:
    """The ratio of mean times to first token, which depends less on the requests' order."""
    means = [float(row["detail"].get("mean_ttft_ms") or 0.0) for row in (ours, *others)]
    if not all(means):
        return ""
    return f" (means: {means[0] / min(means[1:]):.3f})"


def _grown(row: Row, ours: Row | None, reference: Row | None) -> list[Bar]:
    """Steps of beams by their own limits; in all, never slower than the host's own backend."""
    peers = [reference] if reference else []
    limit = BEAMS.get((row["prefix"] or 0, row["branches"] or 0))
    if row["workload"] == "beams" and limit:
        asked = f"≤ {limit:.2f} of {HOSTS[row['host']].backends[1]}"
        return [_time(row, ours, peers, limit, asked)]
    asked = f"≤ {UNSHARED} of the time of {HOSTS[row['host']].backends[1]}"
    if failed := _failure(ours):
        return [Bar(case_name(row), asked, failed, False)]
    times = [float(each["detail"].get("total_s") or 0.0) for each in (ours, reference) if each]
    if len(times) < 2 or not all(times):
        return [Bar(case_name(row), asked, "not measured on both", None)]
    ratio = round(times[0] / times[1], 4)
    return [Bar(case_name(row), asked, f"{ratio:.3f}", ratio <= UNSHARED)]


def _traffic(row: Row, ours: Row | None) -> Bar:
    """No failed request, no trouble in the log, no wrong token."""
    case, asked = case_name(row), "no failure, no wrong token"
    if failed := _failure(ours):
        return Bar(case, asked, failed, False)
    if ours is None or not (checked := ours["detail"].get("checked")):
        left = still_to_run(ours) if ours else None
        return Bar(case, asked, left or "not checked against the reference yet", None)
    trouble = ours["detail"].get("log_trouble", 0)
    said = f"{checked['tokens']:,} tokens: {checked['wrong']} wrong, {checked['ties']} ties"
    if trouble:
        said += f", {trouble} lines of trouble in the log"
    if not _at_work(ours):
        return Bar(case, asked, f"{said}; {_IDLE}", None)
    met = not checked["wrong"] and not trouble and checked["tokens"] > 0
    return Bar(case, asked, said, met)


def _scheduler(row: Row, ours: Row | None, reference: Row | None) -> Bar:
    """CPU time that the plugin adds to a step of the one-layer model."""
    case, asked = case_name(row), f"≤ {SCHEDULER_US:.0f} µs a step more than the host's own"
    if failed := _failure(ours):
        return Bar(case, asked, failed, False)
    if ours is None or reference is None or not ours["tpot_ms"] or not reference["tpot_ms"]:
        return Bar(case, asked, "not measured on both", None)
    added = round((ours["tpot_ms"] - reference["tpot_ms"]) * 1e3, 2)
    return Bar(case, asked, f"{added:+.1f} µs", added <= SCHEDULER_US)


_IDLE = "no step counted through tree attention"


def _at_work(ours: Row) -> bool:
    """Whether the plugin counted steps through tree attention for the row."""
    return bool(ours["detail"].get("steps", {}).get("tree"))


def _failure(ours: Row | None) -> str | None:
    return None if ours is None or not ours["error"] else ours["error"].splitlines()[0][:80]

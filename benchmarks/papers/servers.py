"""The papers' workloads in whole servers: reasoning trees, few-shot prompts and documents.

For DeFT's end-to-end tables and FastTree's comparison with SGLang. Each policy has a server of its
own, and the host's own backend another; all get the same requests (`benchmarks e2e`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.e2e.backends import HOSTS
from benchmarks.e2e.choice import BatchChoice, Choice, ModelChoice, Output, ServerChoice, TreeChoice
from benchmarks.papers.workloads import FEW_SHOT, PROMPT_TOKENS

WORKLOADS = ("grid", "documents", "trees")
SUFFIX_TOKENS = 64
REPEATS = 2


def choices(
    host: str,
    policies: Sequence[str],
    traces: Path,
    out: Path,
    checkpoint: Path | None,
    command: str = "",
) -> list[Choice]:
    """A run for each policy, and the host's own backend last; all add to one file of rows."""
    on_gpu = HOSTS[host].on_gpu()
    backend, reference = HOSTS[host].ours, HOSTS[host].reference()
    servers = [
        *(ServerChoice(host, [backend], reference, policy=policy) for policy in policies),
        ServerChoice(host, [reference], reference),
    ]
    cases = [f"{PROMPT_TOKENS},{width},{SUFFIX_TOKENS}" for width in FEW_SHOT] if on_gpu else []
    return [
        Choice(
            Output(out, command),
            WORKLOADS,
            server,
            ModelChoice(weights="dummy" if on_gpu else "random", checkpoint=checkpoint),
            BatchChoice(cases, None, REPEATS),
            TreeChoice(traces, 1.0 if on_gpu else 0.01),
        )
        for server in servers
    ]

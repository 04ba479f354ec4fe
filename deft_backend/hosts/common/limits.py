"""What every adapter decides from the settings alone: batch sizes, and whether to observe."""

from __future__ import annotations

from deft_backend.config import Settings, warn_unknown
from deft_backend.hosts.common.tested_versions import tries_others

SINKS_ON_GPU = "attention sinks on a GPU"
"""Why the host's kernel runs a layer with sinks."""

SINKS_ON_GPUS = frozenset({"sglang"})
"""Hosts whose servers on a GPU decode layers with sinks through tree attention, because a recorded
run compared every token (docs/results/models.json)."""

EIGHT_BITS_ON_GPUS = frozenset({"sglang"})
"""The same for KV caches of 8 bits."""

CHAINS_ON_GPUS = frozenset({"sglang"})
"""The same for speculative decoding with chains of drafts
(docs/results/speculation-sglang-h100.json). No recorded run has compared a server with token trees
on a GPU yet; the kernels' tests there compute both."""

EIGHT_BIT_CACHES = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Hosts' names for KV caches of 8 bits with one scale for all keys and one for all values, and
torch's names for their dtypes."""


def refused_cache(name: str, device: str, host: str) -> str | None:
    """Why the host's kernel decodes a KV cache of the host's kind `name`, or None.

    `device` is "cuda" or "cpu"; `host` is "sglang" or "vllm".
    """
    if name not in EIGHT_BIT_CACHES:
        return f"a KV cache of kind {name} is not supported"
    if device == "cuda" and host not in EIGHT_BITS_ON_GPUS:
        return f"a KV cache of kind {name} is not supported on GPUs"
    return None


def refused_sinks(device: str, host: str) -> str | None:
    """Why the host's kernel runs a layer with sinks, or None.

    `device` is "cuda" or "cpu"; `host` is "sglang" or "vllm".
    """
    return None if device == "cpu" or host in SINKS_ON_GPUS else SINKS_ON_GPU


def refused_speculation(device: str, host: str, *, trees: bool) -> str | None:
    """Why a server that speculates gets no tree attention, or None.

    `device` is "cuda" or "cpu"; `host` is "sglang" or "vllm"; `trees` says whether drafts form
    token trees. ``DEFT_UNTESTED_HOST=1`` tries it.
    """
    if device == "cpu" or (host in CHAINS_ON_GPUS and not trees) or tries_others():
        return None
    what = "speculative decoding with token trees" if trees else "speculative decoding"
    return f"{what} was not tested on a GPU (DEFT_UNTESTED_HOST=1 tries it)"


def refused(requests: int, settings: Settings, planned: int) -> str | None:
    """Why the host's kernel decodes a batch of `requests` requests, or None.

    Parameters
    ----------
    requests : int
        Of the batch. In a CUDA graph, the size that it was captured for.
    settings : Settings
    planned : int
        Requests that a plan holds.
    """
    if requests > settings.max_batch:
        return f"batch larger than DEFT_MAX_BATCH={settings.max_batch}"
    if requests > planned:
        return f"batch larger than the {planned} requests that a plan holds"
    if requests < settings.min_batch:
        return f"batch smaller than DEFT_MIN_BATCH={settings.min_batch}"
    return None


def observing() -> bool:
    """Whether servers with another backend count their steps (``DEFT_OBSERVE``).

    Invalid settings stop only servers started with our backend; in other servers they mean no. For
    settings that do not exist, the log gives their names.
    """
    warn_unknown()
    try:
        return Settings.from_env().observe
    except ValueError:
        return False

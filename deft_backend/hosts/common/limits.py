"""What every adapter decides from the settings alone: batch sizes, and whether to observe."""

from __future__ import annotations

from deft_backend.config import Settings, warn_unknown

SINKS_ON_GPU = "attention sinks on a GPU"
"""Why the host's kernel runs a layer with sinks."""

SINKS_ON_GPUS = False
"""Whether servers on a GPU decode layers with sinks through tree attention. On an H100, a small
model of gpt-oss differed from the host's own backend in 2 of 1,248 tokens by more than the
tolerance; on the CPU every token is right."""

EIGHT_BITS_ON_GPUS = False
"""Whether servers on a GPU decode a KV cache of 8 bits through tree attention. No recorded run has
shown these kernels right on a GPU yet."""

EIGHT_BIT_CACHES = {
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Hosts' names for KV caches of 8 bits with one scale for all keys and one for all values, and
torch's names for their dtypes."""


def refused_cache(name: str, device: str) -> str | None:
    """Why the host's kernel decodes a KV cache of the host's kind `name`, or None.

    `device` is "cuda" or "cpu".
    """
    if name not in EIGHT_BIT_CACHES:
        return f"a KV cache of kind {name} is not supported"
    if device == "cuda" and not EIGHT_BITS_ON_GPUS:
        return f"a KV cache of kind {name} is not supported on GPUs"
    return None


def refused_sinks(device: str) -> str | None:
    """Why the host's kernel runs a layer with sinks, or None; `device` is "cuda" or "cpu"."""
    return None if device == "cpu" or SINKS_ON_GPUS else SINKS_ON_GPU


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

"""What decides on the host, the same in every adapter: batch sizes, and whether to observe."""

from __future__ import annotations

from deft_backend.config import Settings, warn_unknown


def refused(requests: int, settings: Settings, planned: int) -> str | None:
    """Why the host's own kernel decodes a batch of so many requests, or None.

    Parameters
    ----------
    requests : int
        Of the batch, its padding included where a graph was captured for that size.
    settings : Settings
    planned : int
        Requests that a plan holds.
    """
    if requests > settings.max_batch:
        return "batch above DEFT_MAX_BATCH"
    if requests > planned:
        return "batch above what a plan holds"
    if requests < settings.min_batch:
        return "batch below DEFT_MIN_BATCH"
    return None


def observing() -> bool:
    """Whether servers with another backend count their steps (``DEFT_OBSERVE``).

    A setting that is not allowed is said where our backend is asked for; other servers need none.
    One that does not exist is said here, too.
    """
    warn_unknown()
    try:
        return Settings.from_env().observe
    except ValueError:
        return False

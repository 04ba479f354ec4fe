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
        return f"batch larger than DEFT_MAX_BATCH={settings.max_batch}"
    if requests > planned:
        return f"batch larger than the {planned} requests that a plan holds"
    if requests < settings.min_batch:
        return f"batch smaller than DEFT_MIN_BATCH={settings.min_batch}"
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

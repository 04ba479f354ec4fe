"""What every adapter decides without its host: batch sizes, and whether to observe."""

from deft_backend.settings.config import Settings, warn_unknown


def refused(requests: int, settings: Settings, planned: int) -> str | None:
    """Why the host's kernel decodes a batch of `requests` requests, or None.

    For a CUDA graph, `requests` is the size that it was captured for. A plan holds `planned`.
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

    In these servers invalid settings mean no. The log names settings that do not exist.
    """
    warn_unknown()
    try:
        return Settings.from_env().observe
    except ValueError:
        return False

"""What every adapter decides without its host: refusals, batch sizes, and whether to observe."""

from __future__ import annotations

from deft_backend.settings.config import Settings, warn_unknown

MLA_IS_OFF = (
    "MLA models decode on the host's backend; DEFT_MLA=1 tries tree attention for them, which "
    "saves time behind long shared prefixes alone"
)


class Unsupported(RuntimeError):
    """Why the host's own attention runs instead of tree attention, in one line.

    Without a message if the log has the reason already.
    """


def refuse_if(reason: str | None) -> None:
    """Raise Unsupported if there is a reason."""
    if reason is not None:
        raise Unsupported(reason)


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
    """Log settings that do not exist; servers with another backend count nothing."""
    warn_unknown()
    return False

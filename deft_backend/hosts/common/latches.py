"""What an adapter does once and then remembers: give up after a failure, and log a line."""

import logging

logger = logging.getLogger("deft_backend")


class FailureLatch:
    """The first failure of tree attention. From then on the host's kernel decodes every step.

    - `reason`: what the counters of steps give as the reason; None while tree attention works.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def kernel_failed(self, error: Exception) -> None:
        """A kernel of tree attention raised `error`."""
        self.close("kernel failed", "a kernel failed (%r)", error)

    def planning_failed(self, error: Exception) -> None:
        """A launch of the device planner raised `error`; it would fail in every batch."""
        self.close("planning failed", "planning failed (%r)", error)

    def close(self, reason: str, message: str, *values: object) -> None:
        """Log the first failure and keep `reason`; later failures change and log nothing."""
        if self.reason is not None:
            return
        self.reason = reason
        logger.error(
            f"deft: {message}. The host's kernel decodes from now on; restart the server to use "
            "tree attention again.", *values,
        )  # fmt: skip
        logger.debug("deft: %s", reason, exc_info=True)


class OnceLog:
    """Logs each warning once, although every layer or step would repeat it."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, message: str, kind: str | None = None) -> None:
        """Log `message` unless a warning of the same `kind` was logged.

        `kind` names messages that differ in their numbers alone; default: the message itself.
        """
        if (kind or message) not in self._logged:
            self._logged.add(kind or message)
            logger.warning("deft: %s", message)

    def layers_left(self, reason: str) -> None:
        """Layers of planned steps run in the host's kernel."""
        self.warn(
            f"layers with {reason} decode through the host's kernel; the others use tree attention"
        )

    def batch_left(self, error: Exception) -> None:
        """The host planner raised `error`; it plans the next batch again."""
        kind = f"planning failed {type(error).__name__}"
        self.warn(f"planning failed ({error!r}). The host's kernel decodes such batches.", kind)
        logger.debug("deft: planning failed", exc_info=True)

"""What an adapter does once and then remembers: give up after a failure, and log a line."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("deft_backend")


class FailureLatch:
    """The first failure of tree attention. From then on the host's kernel decodes every step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.keeps_graphs: Callable[[], bool] = lambda: False

    def kernel_failed(self, error: Exception) -> None:
        self._close("kernel failed", f"a kernel failed ({error!r})")

    def planning_failed(self, error: Exception) -> None:
        """A launch of the device planner raised `error`; it would fail in every batch."""
        self._close("planning failed", f"planning failed ({error!r})")

    def results_differ(self, difference: float, tolerance: float) -> None:
        found = f"differ by {difference:g} (tolerance {tolerance:g})"
        kernels = "the results of tree attention and of the host's kernel"
        self._close("kernel failed", f"DEFT_VERIFY: {kernels} {found}")

    def _close(self, reason: str, message: str) -> None:
        """Log the first failure and keep `reason`; later failures change and log nothing."""
        if self.reason is not None:
            return
        self.reason = reason
        rest = "The host's kernel decodes from now on"
        if self.keeps_graphs():
            rest = (
                "CUDA graphs that hold tree attention stay in use; the host's kernel decodes every "
                "other step from now on"
            )
        logger.error("deft: %s. %s; restart the server to use tree attention again.", message, rest)
        logger.debug("deft: %s", reason, exc_info=True)


class OnceLog:
    """Logs each warning once, although every layer or step would repeat it."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, message: str, kind: str | None = None) -> None:
        if (kind or message) not in self._logged:
            self._logged.add(kind or message)
            logger.warning("deft: %s", message)

    def layers_left(self, reason: str) -> None:
        self.warn(
            f"layers with {reason} decode through the host's kernel; the others use tree attention"
        )

    def batch_left(self, error: Exception) -> None:
        """The reference raised `error`; it plans the next batch again."""
        kind = f"planning failed {type(error).__name__}"
        self.warn(f"planning failed ({error!r}). The host's kernel decodes such batches.", kind)
        logger.debug("deft: planning failed", exc_info=True)


TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""For ``DEFT_VERIFY``: the largest difference allowed, relative to the largest value."""

EIGHT_BITS = 3  # factor of the tolerance with a cache of 8 bits: the host may multiply in 8 bits

SMALLEST = 1e-6  # the tolerance is relative to no smaller value: results of zero agree


def differ(
    ours: torch.Tensor, host: torch.Tensor, *, eight_bits: bool
) -> tuple[float, float] | None:
    """``DEFT_VERIFY``: the largest difference and its tolerance, or None; waits for the device."""
    tolerance = TOLERANCE[host.dtype] * (EIGHT_BITS if eight_bits else 1)
    tolerance *= max(SMALLEST, float(host.abs().max()))
    difference = float((ours.float() - host.float()).abs().max())
    return None if difference <= tolerance else (difference, tolerance)

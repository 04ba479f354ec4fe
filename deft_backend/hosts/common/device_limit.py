"""How many requests a server has planned on the device at once."""

from __future__ import annotations

import logging

from deft_backend.planner.on_device import largest_batch

logger = logging.getLogger("deft_backend")


def planned_on_device(requests: int) -> int:
    """`requests`, or as many as the device plans at once; the log says so where that is fewer."""
    if requests > largest_batch():
        logger.warning(
            "deft: batches of up to %d requests are asked for (DEFT_MAX_BATCH), but plans made on "
            "the device hold %d; larger ones go to the host's kernel", requests, largest_batch(),
        )  # fmt: skip
    return min(requests, largest_batch())

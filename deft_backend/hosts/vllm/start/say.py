"""Log a warning once that every layer of a kind would repeat."""

from __future__ import annotations

import logging

logger = logging.getLogger("deft_backend")

_said: set[str] = set()


def say_once(message: str) -> None:
    """Log a warning, the first time in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning("deft: %s", message)

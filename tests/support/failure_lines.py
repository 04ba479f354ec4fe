"""A test of an adapter fails if tree attention gave up and the test did not expect it.

After a failure the host's kernel computes the right numbers, so results alone show nothing.
"""

import logging

import pytest

SIGNS = ("a kernel failed", "planning failed", "could not be set up", "results of tree attention")


def raising(error):
    """A stand-in for a function that fails."""

    def fail(*args, **kwargs):
        raise error

    return fail


class _Failures(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        line = record.getMessage()
        if record.levelno >= logging.WARNING and any(sign in line for sign in SIGNS):
            self.lines.append(line)


@pytest.fixture
def failures():
    """The log's lines about failures; a test that expects one clears the list."""
    handler = _Failures()
    logger = logging.getLogger("deft_backend")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    assert handler.lines == []

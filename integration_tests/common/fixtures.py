"""Fixtures that the ``conftest.py`` of each host imports."""

import signal

import pytest

from integration_tests.common.plain_model import PlainModel
from integration_tests.common.server import MODEL


@pytest.fixture(scope="session", autouse=True)
def model_exists():
    if not (MODEL / "config.json").is_file():
        pytest.fail(f"{MODEL} holds no model; train it with models/train_tiny_llama.py")


@pytest.fixture(scope="session")
def model():
    """The right answers of servers in float32; no server is needed for them."""
    return PlainModel(MODEL)


@pytest.fixture(scope="session", autouse=True)
def servers_end_with_the_tests():
    """`timeout` and CI end pytest by SIGTERM. Like Ctrl-C, it must also end the servers."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)

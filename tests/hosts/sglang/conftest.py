"""No test of SGLang's adapter passes because the host's kernel ran where ours failed."""

import pytest

from failure_lines import failures  # noqa: F401
from sglang_fakes import load_host


@pytest.fixture(autouse=True)
def no_failures(failures):  # noqa: F811
    """See ``failures``: a test that expects a failure clears the list."""


@pytest.fixture(scope="session")
def host():
    """The host's base class of attention backends."""
    return load_host()

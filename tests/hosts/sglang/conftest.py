"""No test of SGLang's adapter passes because the host's kernel ran where ours failed."""

import pytest

from deft_backend.hosts.common import planner_ahead
from failure_lines import failures  # noqa: F401
from sglang_fakes import load_host


@pytest.fixture(autouse=True)
def no_failures(failures):  # noqa: F811
    """See ``failures``: a test that expects a failure clears the list."""


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    """One entry for each process that a server would start; no test compiles in one."""
    started = []
    monkeypatch.setattr(planner_ahead, "start", lambda: started.append("ahead"))
    return started


@pytest.fixture(scope="session")
def host():
    """The host's base class of attention backends."""
    return load_host()

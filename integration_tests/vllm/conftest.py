"""Servers shared by the tests: the host's own backend throughout, ours one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:  # the other host's environment
    collect_ignore_glob = ["test_*.py"]
else:
    from vllm_server import GROUPS, MODEL, Ask, Server, running, write_adapter


class Reference:
    """The answers of the host's own backend, each asked for once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._known: dict[Ask, object] = {}

    def answers(self, asks: list[Ask]) -> list[object]:
        unknown = list(dict.fromkeys(ask for ask in asks if ask not in self._known))
        self._known.update(zip(unknown, self.server.complete(unknown), strict=True))
        return [self._known[ask] for ask in asks]


@pytest.fixture(scope="session", autouse=True)
def model_exists() -> None:
    if not (MODEL / "config.json").is_file():
        pytest.fail(f"{MODEL} holds no model; train it with models/train_tiny_llama.py")


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with random weights."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder)
    return folder


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[Server]:
    """The host's own backend, observed."""
    folder = tmp_path_factory.mktemp("baseline")
    with running(None, GROUPS["default"], folder, adapter) as server:
        yield server


@pytest.fixture(scope="session")
def reference(baseline: Server) -> Reference:
    return Reference(baseline)


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    adapter: Path,
    baseline: Server,
) -> Iterator[Server]:
    """The plugin, under the flags of the group that the test names."""
    folder = tmp_path_factory.mktemp(request.param)
    with running("deft", GROUPS[request.param], folder, adapter) as server:
        yield server

"""Servers shared by the tests: the baseline throughout, the others one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("sglang", reason="the integration tests start real SGLang servers")

from sglang_server import GROUPS, MODEL, Answer, Ask, Group, Server, running


class Reference:
    """The answers of the host's own backend, each asked for once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._known: dict[Ask, list[Answer]] = {}

    def answers(self, asks: list[Ask]) -> list[list[Answer]]:
        unknown = list(dict.fromkeys(ask for ask in asks if ask not in self._known))
        self._known.update(zip(unknown, self.server.complete(unknown), strict=True))
        return [self._known[ask] for ask in asks]


@pytest.fixture(scope="session", autouse=True)
def model_exists() -> None:
    if not (MODEL / "config.json").is_file():
        pytest.fail(f"{MODEL} holds no model; train it with models/train_tiny_llama.py")


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The host's own backend, observed."""
    with running(None, Group(), tmp_path_factory.mktemp("baseline")) as server:
        yield server


@pytest.fixture(scope="session")
def reference(baseline: Server) -> Reference:
    return Reference(baseline)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
           baseline: Server) -> Iterator[Server]:  # fmt: skip
    """The plugin, under the flags of the group that the test names."""
    group = GROUPS[request.param]
    with running("deft", group, tmp_path_factory.mktemp(request.param)) as server:
        yield server

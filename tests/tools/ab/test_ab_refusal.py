"""`deft ab` on a server that the plugin leaves to its host: the error has the server's own line."""

from __future__ import annotations

import pytest

from deft_backend.tools.ab.comparison import refusal

WORKS = "deft: decode goes through tree attention (policy auto); everything else through fa3"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[2026-11-25 08:00:00] deft: MLA models are not supported; all attention runs through "
            "the host's own backend (fa3)",
            "deft: MLA models are not supported; all attention runs through the host's own "
            "backend (fa3)",
        ),
        (
            "(EngineCore pid=7) WARNING 11-25 [say.py:16] deft: not supported: head dimension 18; "
            "these layers run through FLEX_ATTENTION alone",
            "deft: not supported: head dimension 18; these layers run through FLEX_ATTENTION alone",
        ),
        (WORKS, None),
        ("the server is ready", None),
    ],
)
def test_the_line_of_a_refusal(line: str, expected: str | None) -> None:
    assert refusal(f"loading\n{line}\nfired up") == expected

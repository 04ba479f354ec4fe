"""What commands draw, held against files that a person has read."""

import io

import pytest
from rich.console import Console


def terminal(width=80):
    """A console whose text, with its colours, a test can read."""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        _environ={},
    )


def check_drawn(text, path):
    """To draw the file anew: delete it, run the test, and read the difference in a terminal."""
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path} was missing")
    assert text == path.read_text()


def check_asked(path, answer):
    """Each line of a file that begins with ``$`` asks; the lines behind it are the answer. To draw
    the answers anew: delete all of them, run the test, and read the difference.
    """
    drawn, lines = [], path.read_text().splitlines()
    for line in lines:
        if line.startswith("$"):
            drawn += [line, *answer(*line[1:].split())]
    if all(line.startswith("$") for line in lines):
        path.unlink()
    check_drawn("\n".join(drawn) + "\n", path)

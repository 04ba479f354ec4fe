"""The style of all plots, and the function that writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def style() -> Iterator[None]:
    """Small type, two axes, and equal files for equal results."""
    import matplotlib

    settings = {
        "font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "deft", "axes.spines.top": False,
        "axes.spines.right": False, "axes.edgecolor": "#52606d", "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def save(figure: Any, path: Path) -> Path:
    """Write a figure without a date, so that equal drawings give equal files; returns `path`."""
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    return path

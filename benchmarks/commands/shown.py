"""What a benchmark shows at its end: tables, where the rows lie, and the plots that it drew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deft_backend.cli.shown import say


def show(
    console: Console,
    tables: Iterable[Table],
    width: int,
    rows: Path,
    draw: Callable[[], Iterable[Path]],
) -> None:
    """Print the tables, in a log as wide as `width`; draw the plots if matplotlib is there.

    Parameters
    ----------
    tables : iterable of Table
    width : int
        Characters of a line where there is no terminal.
    rows : Path
        The file that is shown.
    draw : callable
        Draws the plots; returns their files.
    """
    if not console.is_terminal:
        console = Console(width=width)
    for table in tables:
        console.print(table)
    say(console, f"rows    {rows}")
    if find_spec("matplotlib") is None:
        say(console, "no plots: matplotlib is not installed; pip install 'deft-backend[bench]'")
        return
    for drawn in draw():
        say(console, f"plot    {drawn}")

"""The end of a benchmark in the terminal: tables, the file of rows, and the plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deft_backend.cli.errors import say


def show(
    console: Console,
    tables: Iterable[Table],
    width: int,
    rows: Path,
    draw: Callable[[], Iterable[Path]],
) -> None:
    """Print the tables; draw the plots if matplotlib is installed.

    Parameters
    ----------
    tables : iterable of Table
    width : int
        Characters per line if the output is not a terminal.
    rows : Path
        The file that holds the rows.
    draw : callable
        Draws the plots and returns their files.
    """
    if not console.is_terminal:
        console = Console(width=width)
    for table in tables:
        console.print(table)
    say(console, f"rows    {rows}")
    if find_spec("matplotlib") is None:
        say(
            console, "no plots: matplotlib is not installed; run: pip install 'deft-backend[bench]'"
        )
        return
    for drawn in draw():
        say(console, f"plot    {drawn}")

"""`deft top`: every server on this machine, live in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from deft_backend.cli.errors import checked_settings
from deft_backend.files.folders import state_directory

if TYPE_CHECKING:
    from deft_backend.tools.watch.batches import Follower, Row

RECENT = 3600.0  # seconds for which an ended server stays in the view

_ASK_SECONDS = 5.0  # between two questions for the batch of a server with the device planner
_FIRST_ANSWER = 3.0


def top(
    port: Annotated[
        int | None,
        Argument(metavar="[PORT]", min=1, max=65535, help="Only the server on this port."),
    ] = None,
    once: Annotated[bool, Option("--once", help="Print once and end, for scripts.")] = False,
    interval: Annotated[float, Option(min=0.1, max=86400, help="Seconds between looks.")] = 1.0,
) -> None:
    """Show what every server on this machine decodes, reads and saves.

    With --once, the exit code is 1 if no server runs.
    """
    from rich.live import Live

    from deft_backend.tools.watch.top_view import view

    folder = state_directory(checked_settings())
    known: dict[Path, Follower] = {}
    console = Console()
    try:
        if once:
            rows = _rows(folder, port, known, wait=_FIRST_ANSWER)
            console.print(view(rows, str(folder), live=False, port=port))
            raise typer.Exit(0 if any(row.engine.runs for row in rows) else 1)
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                rows = _rows(folder, port, known)
                live.update(view(rows, str(folder), live=True, port=port), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    finally:
        for follower in known.values():
            follower.close()


def _rows(
    folder: Path, port: int | None, known: dict[Path, Follower], wait: float = 0.0
) -> list[Row]:
    """All running engines, and those that ended recently; `known` is kept between two looks."""
    from deft_backend.tools.watch.batches import Follower
    from deft_backend.tools.watch.engines import ENDED, find_engines

    rows = []
    for engine in find_engines(folder, port):
        if engine.status == ENDED and engine.since > RECENT:
            continue
        follower = known.setdefault(engine.path, Follower(_ASK_SECONDS))
        rows.append(follower.look(engine, wait))
    return rows

"""`deft top`: every server on this machine, live in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deft_backend.cli.errors import checked_settings
from deft_backend.files.folders import state_directory

if TYPE_CHECKING:
    from deft_backend.tools.watch.batches import Follower, Row

RECENT = 3600.0  # seconds for which an ended server stays in the view

_ASK_SECONDS = 5.0
"""Seconds between two questions for the batch of a server with the device planner."""

_FIRST_ANSWER = 3.0


def top(
    port: Annotated[
        int | None,
        typer.Argument(metavar="[PORT]", min=1, max=65535, help="Only the server on this port."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end, for scripts.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds between two looks.")
    ] = 1.0,
) -> None:
    """Show what every server on this machine decodes, reads and saves.

    With --once, the exit code is 1 if no server runs.
    """
    from deft_backend.tools.watch.top_view import view

    folder = state_directory(checked_settings())
    watched = _Watched(folder, port)
    console = Console()
    if once:
        rows = watched.rows(wait=_FIRST_ANSWER)
        console.print(view(rows, str(folder), live=False, port=port))
        watched.close()
        raise typer.Exit(0 if any(row.engine.runs for row in rows) else 1)

    from rich.live import Live

    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(view(watched.rows(), str(folder), live=True, port=port), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    finally:
        watched.close()


class _Watched:
    """The engines under a folder, and what this view remembers of each between two looks."""

    def __init__(self, folder: Path, port: int | None) -> None:
        self._folder = folder
        self._port = port
        self._known: dict[Path, Follower] = {}

    def rows(self, wait: float = 0.0) -> list[Row]:
        """All running engines, and those that ended recently."""
        from deft_backend.tools.watch.batches import Follower
        from deft_backend.tools.watch.engines import ENDED, find_engines

        rows = []
        for engine in find_engines(self._folder, self._port):
            if engine.status == ENDED and engine.since > RECENT:
                continue
            follower = self._known.setdefault(engine.path, Follower(_ASK_SECONDS))
            rows.append(follower.look(engine, wait))
        return rows

    def close(self) -> None:
        for follower in self._known.values():
            follower.close()
